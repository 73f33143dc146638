"""What holds for the repository as a whole: files, docstrings, generated code, documented commands."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GENERATED = "graftree/v1/"


def tracked(pattern: str = "*") -> list[Path]:
    """Files that git knows and that are there, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in sorted(set(listed.stdout.splitlines())) if (ROOT / line).is_file()]


def text_of(path: Path) -> str:
    """Its text; "" for a binary file."""
    content = (ROOT / path).read_bytes()
    return "" if b"\0" in content else content.decode()


def test_no_machine_paths_and_no_index_hosts() -> None:
    """Nothing in the repository depends on one machine's folders or names a package index."""
    words = (
        "/wo" + "rk/",
        "/ro" + "ot/",
        "/opt/" + "wheels",
        "extra-index" + "-url",
        "--index" + "-url",
        "pypi" + ".org",
    )
    found = [f"{path}: {word}" for path in tracked() for word in words if word in text_of(path)]
    assert found == []


def test_no_pickle_and_no_remote_code() -> None:
    """Weights are data: nothing unpickles and nothing runs a model repository's own code."""
    pattern = re.compile(r"^\s*(import|from) pickle\b|trust_remote_code\s*=\s*True|torch\.load\(", re.MULTILINE)
    assert [str(path) for path in tracked("*.py") if pattern.search(text_of(path))] == []


def test_no_unfinished_business() -> None:
    """No to-do marks are left in code or documents, and no test is skipped or expected to fail."""
    words = ("TO" + "DO", "FIX" + "ME", "pytest.mark." + "skip(", "pytest.mark." + "xfail")
    found = [f"{path}: {word}" for path in tracked() for word in words if word in text_of(path)]
    assert found == []


def test_every_module_and_test_says_what_it_is_for() -> None:
    """Every module has a docstring, and so has every test."""
    missing = []
    for path in tracked("*.py"):
        if str(path).startswith(GENERATED):
            continue
        module = ast.parse(text_of(path))
        if ast.get_docstring(module) is None:
            missing.append(str(path))
        for node in ast.walk(module):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if function and node.name.startswith("test_") and ast.get_docstring(node) is None:
                missing.append(f"{path}::{node.name}")
    assert missing == []


def test_services_do_not_import_each_other() -> None:
    """A tier imports graftree and kernels, never another tier."""
    tiers = ("router", "speculator_service", "verifier_service")
    wrong = []
    for path in tracked("*.py"):
        package = path.parts[0]
        if package not in (*tiers, "graftree", "kernels"):
            continue
        for node in ast.walk(ast.parse(text_of(path))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            wrong += [f"{path}: {name}" for name in names if name.split(".")[0] in set(tiers) - {package}]
    assert wrong == []


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    """graftree/v1 is exactly what protos/generate.py makes of protos/."""
    subprocess.run([sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)], check=True, cwd=ROOT)
    fresh = {path.name: path.read_text() for path in (tmp_path / GENERATED).iterdir() if path.is_file()}
    present = {path.name: text_of(path) for path in tracked(f"{GENERATED}*")}
    assert fresh == present


def test_pinned_versions_are_in_range() -> None:
    """Every pin of constraints.txt names a dependency in use, once."""
    pins = [line.split("==")[0] for line in text_of(Path("constraints.txt")).splitlines() if "==" in line]
    assert len(pins) == len(set(pins))
    project = tomllib.loads(text_of(Path("pyproject.toml")))["project"]
    extras = [item for items in project["optional-dependencies"].values() for item in items]
    names = {re.split(r"[\[<>=;]", item)[0] for item in (*project["dependencies"], *extras)}
    assert set(pins) <= names


def test_every_dependency_is_explained() -> None:
    """docs/dependencies.md has a line for each direct dependency."""
    project = tomllib.loads(text_of(Path("pyproject.toml")))["project"]
    extras = [item for items in project["optional-dependencies"].values() for item in items]
    names = {re.split(r"[\[<>=;]", item)[0] for item in (*project["dependencies"], *extras)} - {"graftree"}
    page = text_of(Path("docs/dependencies.md"))
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_links_between_documents_lead_somewhere() -> None:
    """Relative links of the Markdown files point to files that exist."""
    broken = []
    for path in tracked("*.md"):
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(path)):
            if "://" not in link and not (ROOT / path.parent / link).exists():
                broken.append(f"{path}: {link}")
    assert broken == []


def code_lines(path: str) -> list[str]:
    """Lines of the fenced shell blocks of a Markdown file."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text_of(Path(path)), re.DOTALL)
    return [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_readme_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Each `make` target and each `graftree` command line of the README is one that exists."""
    from graftree.cli import parser

    lines = code_lines("README.md")
    targets = set(re.findall(r"^([a-z]+):", text_of(Path("Makefile")), re.MULTILINE))
    makes = [line.split()[1] for line in lines if line.startswith("make ")]
    assert makes
    assert set(makes) <= targets
    commands = [line for line in lines if line.startswith("graftree ")]
    assert commands
    for command in commands:
        arguments = re.sub(r"\s+#.*$", "", command)
        parser().parse_args(_split(arguments)[1:])


def _split(command: str) -> list[str]:
    import shlex

    return shlex.split(command)
