"""`Export`: what a plain attribute of a pod is called as a metric, and how it is read when somebody asks.

Nothing here runs while a pod works: counters are plain numbers, and a scrape reads them. Each tier lists its exports
in `exports.py`; a name is spelt out there once, so the dashboard and the alerts can be checked against the code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from graftree.observe.histogram import Histogram

P = TypeVar("P")

Kind = Literal["counter", "gauge", "histogram"]
Reading = float | Histogram | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Export(Generic[P]):
    """One metric of a pod of class P.

    Attributes:
        name: in full; a counter's ends in _total.
        help: one sentence.
        read: the value, or one per tuple of label values; None = there is nothing to tell.
        labels: names of the labels.
    """

    name: str
    kind: Kind
    help: str
    read: Callable[[P], Reading | None]
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert re.fullmatch(r"graftree_[a-z0-9_]+", self.name), self.name
        assert (self.kind == "counter") == self.name.endswith("_total"), self.name


def counters_of(
    prefix: str,
    record: type[Any],
    find: Callable[[P], Any],
    *,
    leave_out: Iterable[str] = (),
) -> list[Export[P]]:
    """An export for every int field of a dataclass of counters: <prefix>_<field>_total.

    Args:
        record: the dataclass; the "Attributes:" of its docstring are the help texts.
        find: pod -> its record.
        leave_out: fields that are exported under another name.
    """
    helps, skipped = _attributes(record.__doc__ or ""), set(leave_out)
    return [
        Export(
            f"{prefix}_{field.name}_total",
            "counter",
            helps.get(field.name, field.name.replace("_", " ").capitalize() + "."),
            _reader(find, field.name),
        )
        for field in dataclasses.fields(record)
        if field.type in (int, "int") and field.name not in skipped
    ]


def _reader(find: Callable[[P], Any], name: str) -> Callable[[P], float]:
    return lambda pod: getattr(find(pod), name)


def _attributes(docstring: str) -> dict[str, str]:
    """Name -> text of a docstring's "Attributes:" section; several names may share a text."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.partition("Attributes:\n")[2].splitlines():
        match = re.fullmatch(r" {8}([a-z0-9_]+(?:, [a-z0-9_]+)*): (.*)", line)
        if match:
            names = match[1].split(", ")
            text = match[2]
        elif names and line.startswith(" " * 10):
            text = line.strip()
        else:
            names = []
            continue
        for name in names:
            found[name] = f"{found[name]} {text}" if name in found else text[:1].upper() + text[1:]
    return found
