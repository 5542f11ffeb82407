"""What imports what: the contracts in pyproject.toml, and that no modules import each other in a circle."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import networkx as nx
import pytest

grimp = pytest.importorskip("grimp", reason="import-linter is not installed")
lint_imports = pytest.importorskip("importlinter.cli").lint_imports

ROOT = Path(__file__).resolve().parent.parent


def test_the_contracts_hold():
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0, "said above"


def test_no_modules_import_each_other_in_a_circle():
    # A package and what is in it too, of which import-linter says nothing.  Those in functions and for types count.
    found = grimp.build_graph("fusegraph", "codegen", cache_dir=None)
    edges = [(module, other) for module in found.modules for other in found.find_modules_directly_imported_by(module)]
    assert len(edges) > 2000
    assert [sorted(c) for c in nx.strongly_connected_components(nx.DiGraph(edges)) if len(c) > 1] == []


def test_the_page_tells_of_every_layer():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = page.partition("## What may import what")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    assert [row.replace("`", "").replace(", ", " | ") for row in rows] == contracts[0]["layers"]
