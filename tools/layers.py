"""Tells which folder imports which, for docs/architecture.md: not within functions, nor for types alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Folders of the table, from what users call down to what knows of nothing else.
FOLDERS = (
    "fusegraph/cli", "fusegraph/bench", "fusegraph/report", "fusegraph/frontends", "fusegraph/engines",
    "fusegraph/runtime", "fusegraph/passes", "fusegraph/lowering", "fusegraph/ops", "codegen",
)  # fmt: skip


def table() -> str:
    """Returns a line for each of `FOLDERS`: the other folders that its modules import, and the modules beside them."""
    lines = ["| folder | imports of other folders | of the modules beside them |", "| --- | --- | --- |"]
    for folder in FOLDERS:
        found = {_unit(module) for path in (ROOT / folder).rglob("*.py") for module in _modules(path)} - {folder, ""}
        folders = [f"`{name.removeprefix('fusegraph/')}`" for name in FOLDERS if name in found]
        files = [f"`{name.removeprefix('fusegraph/')}`" for name in sorted(found - set(FOLDERS))]
        lines.append(f"| `{folder}` | {', '.join(folders) or 'none'} | {', '.join(files) or 'none'} |")
    return "\n".join(lines) + "\n"


def _unit(module: str) -> str:
    """Returns the folder of a module, or the file of one beside the folders; "" if it is another project's."""
    package, _, rest = module.partition(".")
    if package == "codegen":
        return "codegen"
    first = rest.partition(".")[0]
    if package != "fusegraph" or not first:
        return ""
    return f"fusegraph/{first}" if (ROOT / "fusegraph" / first).is_dir() else f"fusegraph/{first}.py"


def _modules(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports where it begins."""
    for statement in ast.parse(path.read_text("utf-8")).body:
        for node in statement.body if isinstance(statement, ast.Try) else [statement]:
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = (f"{node.module}.{name.name}" for name in node.names)
                yield from inner if node.module == "fusegraph" else [node.module]
