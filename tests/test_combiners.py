"""The tables of combiners and of modes: every entry is whole, one more is enough, and nothing else asks for names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from graphs import check_all

import codegen
import fusegraph as fg
from codegen.combiners import ADD, COMBINERS, Combiner
from fusegraph.ops.modes import ABS, COMBINED, MEAN, MODES, PARTS, Combined
from fusegraph.passes import split_reductions
from fusegraph.plan import plan
from fusegraph.report.bounds_combined import ERRORS
from fusegraph.report.check import random_inputs
from fusegraph.report.eager_reductions import REDUCTIONS

DEVICE = Path(codegen.__file__).parent / "device"
NAMES = {*COMBINERS, *MODES, *PARTS}
#: What holds a name in a comparison that is to be a question to the table.
HOLDERS = re.compile(r"\b(mode|mode_of|combine|combiner|fold|reduction|attributes\['mode'\])\b")


@pytest.mark.parametrize("combiner", COMBINERS.values(), ids=lambda c: c.name)
def test_combiners_are_whole(combiner: Combiner) -> None:
    """The neutral value is one in every type, the device functions exist, and what rounds has an error bound."""
    values = {"float32": [-np.inf, -1.5, 0.0, 2.0, np.inf, np.nan], "uint8": [0, 3, 255], "int32": [0, 7]}
    for dtype, numbers in values.items():
        if combiner.functor if dtype == "float32" else combiner.widens or combiner.selects:
            array = np.array(numbers, dtype)
            start = np.array(combiner.start(dtype), dtype)
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(combiner.ufunc(start, array), array)
    assert combiner.functor or combiner.atomic
    assert combiner.selects == (combiner.name not in ERRORS)
    for header, name in (("reduce", combiner.functor), ("scatter", combiner.atomic)):
        if name:
            assert re.search(rf"\b{name.split('::')[1]}\b", (DEVICE / f"{header}.cuh").read_text())
    assert bool(combiner.function) == bool(combiner.functor)


@pytest.mark.parametrize("mode", COMBINED.values(), ids=lambda m: m.name)
def test_parts_make_the_whole(mode: Combined) -> None:
    """In NumPy, with what is not finite: the parts combined, and what is done to the result."""
    rng = np.random.default_rng(0)
    x = rng.choice([-np.inf, np.inf, np.nan, *rng.standard_normal(40)], (64, 20))
    x[0], x[1] = rng.standard_normal((2, 20))
    with np.errstate(all="ignore"):
        parts = np.stack([mode.part.combine(part, (1,)) for part in np.split(x, 4, 1)])
        total = mode.combiner.ufunc.reduce(parts, axis=0)
        total = total if mode.after is None else mode.after.numpy(total, 20)
        np.testing.assert_allclose(total, mode.reference(x, (1,), False, None), rtol=1e-12)


@pytest.mark.parametrize("split", [False, True])
def test_one_more_entry_is_enough(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of absolute values: in a graph, in kernels whole and in parts, with its bounds."""
    mode = Combined("mean_abs", ADD, ABS, MEAN)
    for table in (COMBINED, MODES):
        monkeypatch.setitem(table, mode.name, mode)
    if split:
        monkeypatch.setattr(split_reductions, "SHORT_BYTES", 0)
        monkeypatch.setattr(split_reductions, "LEAST_PART_BYTES", 256)
    g = fg.Graph("one more")
    g.output(g.reduction(g.tensor("x", (3, 700)), mode.name, 1), name="y")
    ops = [node.op.name for kernel in plan(g).kernels for node in kernel.group.nodes]
    assert ("reduction_partial" in ops) == split
    check_all([g])
    check_all([g], inputs=lambda g: random_inputs(g, 1, special=1e-3))


def test_torch_has_every_mode() -> None:
    assert set(REDUCTIONS) == set(MODES)


def compared(tree: ast.Module) -> Iterator[ast.Compare]:
    """Yields comparisons of what holds a mode or a combiner with the name of one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            constants = {n.value for side in sides for n in ast.walk(side) if isinstance(n, ast.Constant)}
            if constants & NAMES and any(HOLDERS.search(ast.unparse(side)) for side in sides):
                yield node


@pytest.mark.slow
def test_nothing_else_compares_names() -> None:
    root = Path(codegen.__file__).parents[1]
    found = []
    for path in sorted([*root.glob("codegen/**/*.py"), *root.glob("fusegraph/**/*.py")]):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("fusegraph/ops/", "fusegraph/frontends/")):
            found += [f"{name}:{node.lineno}: {ast.unparse(node)}" for node in compared(ast.parse(path.read_text()))]
    assert found == []


def test_comparisons_are_seen() -> None:
    for text in (
        'mode == "max"',
        'r.combine in ("add", "mul")',
        'node.attributes["mode"] != "avg"',
        'op.fold == "add"',
    ):
        assert len([*compared(ast.parse(text))]) == 1
    for text in ('mode == "convolution"', 'node.op.name == "add"', "mode is SUM"):
        assert [*compared(ast.parse(text))] == []
