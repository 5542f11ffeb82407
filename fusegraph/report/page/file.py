"""Files of reports: one page with its data inside, or the data alone as JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from codegen.target import Target
from fusegraph.errors import FileError
from fusegraph.plan import Plan
from fusegraph.report.artifacts import plain, prepare_file, read_file, write_file
from fusegraph.report.page.compiled import Told, compiled_facts
from fusegraph.report.page.facts import FORMAT, facts_of
from fusegraph.report.page.lines import classes, colours
from fusegraph.report.page.placing import layouts
from fusegraph.report.page.times import with_times

#: Styles of Pygments for code, on a light and on a dark page.
LIGHT, DARK = "default", "github-dark"
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_SCRIPTS = ("dom.js", "graph.js", "details.js", "code.js", "charts.js", "views.js", "page.js")


def save(facts: dict[str, Any], path: str | Path) -> Path:
    """Writes the data of a report (`fusegraph.report.page.facts`), as a page, or as JSON to a file ``*.json``.

    Returns the file's absolute path.  Raises FileError if it cannot be written, ToolchainError where a package that
    pages need is missing.
    """
    file = prepare_file(Path(path))
    write_file(file, _json(facts) if file.suffix == ".json" else page(facts))
    return file


def load(path: str | Path) -> dict[str, Any]:
    """Reads the data of a report, from a page or from JSON.  Raises FileError for any other file."""
    text = read_file(Path(path))
    found = _DATA.search(text)
    try:
        facts = json.loads(found[1] if found else text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.get("generator") != "fusegraph" or "graphs" not in facts:
        raise FileError(f"{path} is no report of fusegraph's; write one with: fusegraph report FILE -o {path}")
    if facts.get("format") != FORMAT:
        raise FileError(f"{path} is a report of format {facts.get('format')}; this release reads format {FORMAT}")
    return facts


def page(facts: dict[str, Any]) -> str:
    """Returns the page that shows the data of a report."""
    shown = {**facts, "classes": classes(), "layouts": [layouts(graph) for graph in facts["graphs"]]}
    style = "\n".join([_part("page.css"), colours(LIGHT, ".code"), colours(DARK, '[data-theme="dark"] .code')])
    parts = {
        "title": html.escape(facts["title"]),
        "style": style,
        "data": _json(shown),
        "script": "\n".join(map(_part, _SCRIPTS)),
    }
    return re.sub(r"<!-- (title|style|data|script) -->", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _json(value: Any) -> str:
    """Returns JSON that may stand in a script's element: nothing in it ends that, or begins a comment."""
    text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def write(
    plans: Sequence[Plan],
    target: Target,
    path: str | Path,
    *,
    title: str,
    left: Sequence[tuple[str, str, str]] = (),
    compiled: bool = True,
    profile: str | Path | None = None,
    fusion: bool = True,
    told: Told = lambda name, count: None,
) -> Path:
    """Writes the report of plans, with the times of a profile if there is one: `facts_of`, `with_times` and `save`.

    ``compiled`` compiles their kernels for it (`compiled_facts`), of which each is ``told``.
    """
    known = compiled_facts(plans, told) if compiled else {}
    facts = facts_of(plans, target, title=title, compiled=known, left=left, fusion=fusion)
    return save(facts if profile is None else with_times(facts, profile), path)
