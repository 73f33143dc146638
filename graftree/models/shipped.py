"""SSM packages that come with the project, by name; needs no torch."""

from __future__ import annotations

from pathlib import Path

from graftree.errors import InvalidArgument

CARD = "ssm.json"
SHIPPED = Path(__file__).parent / "shipped_ssm"


def is_package(directory: Path) -> bool:
    """Whether a directory holds an SSM package (`graftree.models.ssm`)."""
    return (directory / CARD).is_file()


def shipped(name: str) -> Path:
    """Directory of an SSM that comes with the project.

    Raises:
        InvalidArgument: there is none of this name.
    """
    if not name.isidentifier() or not is_package(SHIPPED / name):
        names = ", ".join(sorted(path.name for path in SHIPPED.glob("*") if is_package(path)))
        raise InvalidArgument("model", f"ssm:{name}", f"ssm:<name> with a name of: {names or 'none is shipped'}")
    return SHIPPED / name
