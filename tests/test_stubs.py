"""What type checkers are told of a graph's methods is what these are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from fusegraph.errors import DTypeError
from fusegraph.graph import Graph
from fusegraph.methods import METHODS
from fusegraph.ops import TABLE
from fusegraph.ops.attributes import KINDS
from fusegraph.values import Unfit

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "fusegraph" / "operations.pyi"

USES = """
from fusegraph import Graph, Tensor

graph = Graph()
x, w = graph.tensor("x", (1, 8, 4, 4)), graph.tensor("w", (8, 8, 3, 3))
scale = graph.tensor("scale", (1, 8, 1, 1))
assert_type(graph.conv_fprop(x, w, padding=1, mode="convolution"), Tensor)
assert_type(graph.where(x, 0, x), Tensor)
assert_type(graph.split(x, 2, axis=1), list[Tensor])
assert_type(graph.layernorm(x, scale, 0.0), Tensor)
assert_type(graph.layernorm(x, scale, 0.0, norm_forward_phase="training"), tuple[Tensor, Tensor, Tensor])
assert_type(graph.sdpa(x, x, x), Tensor)
assert_type(graph.sdpa(x, x, x, generate_stats=True), tuple[Tensor, Tensor])
assert_type(graph.batchnorm(x, scale, scale), tuple[Tensor, ...])
"""
WRONG = """
graph.conv_fprop(x, w, pading=1)
graph.conv_fprop(x, w, mode="conv")
graph.relu("x")
graph.grid_sample(x, w, padding="wrap")
graph.rleu(x)
"""


def test_file_is_what_the_tool_writes() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "stubs.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_method_is_told() -> None:
    *_, told = (node for node in ast.parse(STUB.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
    assert {node.name for node in told.body if isinstance(node, ast.FunctionDef)} == set(METHODS)
    assert all(hasattr(Graph, name) for name in METHODS)


@pytest.mark.slow
def test_type_checker(tmp_path: Path) -> None:
    """Right uses have their types; of each wrong one mypy says what is wrong."""
    pytest.importorskip("mypy")
    file = tmp_path / "uses.py"
    file.write_text("from typing import assert_type\n" + USES + WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--no-pretty", file],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    codes = ("call-arg", "arg-type", "arg-type", "arg-type", "attr-defined")
    for line, code in enumerate(codes, file.read_text().splitlines().index("graph.conv_fprop(x, w, pading=1)") + 1):
        assert any(f"uses.py:{line}: " in one and f"[{code}]" in one for one in found), done.stdout
    assert len(found) == len(codes), done.stdout


def test_types_are_those_of_results() -> None:
    def assert_type(result: Any, kind: Any) -> None:
        wanted = get_args(kind)
        if get_origin(kind) is tuple and ... not in wanted:
            assert isinstance(result, tuple)
            assert len(result) == len(wanted)
        else:
            assert isinstance(result, get_origin(kind) or kind)

    exec(USES, {"assert_type": assert_type})


def test_words_are_declared() -> None:
    """Attributes that are words say which: as a Literal, and in the error of another one."""
    for op in TABLE.values():
        for name in op.attributes:
            try:
                KINDS[name]("word")
            except (Unfit, DTypeError):
                continue
            assert name in op.words, f"{op.name}: {name}"
