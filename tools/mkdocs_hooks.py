"""Lets mkdocs show pages and pictures from outside docs; README.md is the first page.

In the repository links lead to files; here they become links between pages of the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: Files outside docs -> their names on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE.txt",
    "codegen/HOPPER.md": "hopper.md",
    "benchmarks/README.md": "measuring.md",
    **{
        path.relative_to(ROOT).as_posix(): f"results/{path.relative_to(folder).as_posix()}"
        for folder in (ROOT / "benchmarks" / "results", ROOT / "benchmarks")
        for path in (folder.rglob("*") if folder.name == "results" else folder.iterdir())
        if path.suffix in (".svg", ".json")
    },
}
_HOME = {there: ROOT / here for here, there in OUTSIDE.items()}


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside docs to the site."""
    for here, there in OUTSIDE.items():
        files.append(File.generated(config, there, abs_src_path=str(ROOT / here)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns a page's text with links to files of the repository turned into links within the site."""
    home = _HOME.get(page.file.src_uri, ROOT / "docs" / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        name, mark, heading = match[1].partition("#")
        if not name or "://" in name:
            return match[0]
        path = Path(os.path.normpath(home / name)).relative_to(ROOT).as_posix()
        there = OUTSIDE.get(path, path.removeprefix("docs/"))
        return f"]({there}{mark}{heading})"

    return re.sub(r"\]\(([^)\s]+)\)", link, markdown)
