"""Operands A that the consumers of the Hopper kernels compute in registers, on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, check_cases, executable
from test_prologue import (
    affine,
    apart,
    dequantised,
    form,
    gradients,
    image,
    inverse,
    positions,
    product,
    residual,
    to,
    vector,
)

import fusegraph as fg
from codegen import render, target
from codegen.computed_tiles import computed
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.declined import Declined
from codegen.packed import packed
from codegen.spec import ContractionSpec
from fusegraph.runtime import nvrtc

pytestmark = pytest.mark.usefixtures("contractions_in_one_piece", "prologues_in_products")
BOTH = ("bfloat16", "bfloat16")


def registers(case: Case, **wanted: Any) -> Case:
    return form(case, "wgmma", computes=True, **wanted)


def spec_of(case: Case) -> ContractionSpec:
    made = executable(replace(case, arch="sm_90a"))
    assert made.plan is not None
    spec = made.plan.kernels[-1].group.lowered.spec
    assert isinstance(spec, ContractionSpec)
    return spec


def rows_and_columns(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Computes with operands of every kind: a scalar, one per row, one per column, and a second tensor."""
    shift = graph.tensor("shift", (1,), "float32")
    row, column = vector(graph, x, -2, "of_row"), vector(graph, x, -1, "of_column", x.dtype.name)
    other = graph.tensor("other", x.shape, x.dtype)
    return graph.cast(graph.tanh((x - row) * column) + other * shift, x.dtype)


def reciprocal(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Computes 1 / x, which is infinite for the zeros that TMA fills in beyond the tensor."""
    return graph.cast(graph.reciprocal(x), x.dtype)


def nowhere_zero(case: Case) -> Case:
    """Returns the case with inputs between 1 and 2."""
    rng = np.random.default_rng(0)
    given = {t.name: rng.uniform(1, 2, t.shape).astype(t.dtype.numpy) for t in case.graph.inputs}
    arrays = {t.name: np.ndarray(t.shape, t.dtype.numpy, strides=_steps(t)) for t in case.graph.inputs}
    for name, array in arrays.items():
        array[...] = given[name]
    return replace(case, inputs=arrays)


def _steps(tensor: fg.Tensor) -> tuple[int, ...]:
    return tuple(s * tensor.dtype.itemsize for s in tensor.strides)


def test_products():
    cases = [
        product(130, 24, 136, rows_and_columns, None, BOTH),
        nowhere_zero(product(65, 40, 88, reciprocal, None, BOTH)),
    ]
    check_cases([registers(case) for case in cases], guard=True)


def test_padding_is_zero_after_its_prologue():
    case = image((2, 16, 9, 10), (24, 16, 3, 3), affine(1), None, BOTH, padding=1, case={"special": 0.01})
    check_cases([registers(case)], guard=True)


@pytest.mark.slow
def test_more_products():
    pair = ("float16", "float16")
    cases = [
        product(130, 24, 136, affine(-2, "float16"), None, pair),
        product(65, 72, 64, residual, None, pair, over=(False, True)),
        product(72, 56, 80, apart, None, pair, over=(True, False)),
        product(66, 72, 1048, inverse, None, pair, over=(False, True)),
        product(24, 16, 72, affine(-1), None, pair, batch=((3,), (3,))),
        product(24, 16, 40, rows_and_columns, None, pair, batch=((2, 3), (3,))),
        product(24, 16, 40, residual, None, pair, batch=((2, 3), ())),
        product(24, 16, 40, affine(-3), None, pair, batch=((2, 3), ())),
    ]
    cases += [
        product(72, 40, 136, lambda g, x: g.gelu(x), None, pair, over=(turned, False)) for turned in (False, True)
    ]
    cases += [product(66, 24, 40, positions, None, pair, batch=b) for b in (((), ()), ((3,), (3,)))]
    cases += [product(m, n, k, affine(-1), None, pair) for m in (2, 7, 63, 509) for n, k in ((8, 8), (72, 56))]
    for k in (7, 63, 65, 509):  # stored across the sum, which may end anywhere
        cases.append(nowhere_zero(product(72, 8 + k // 9 * 8, k, reciprocal, None, pair, over=(True, False))))
    cases += [replace(cases[0], special=0.01), replace(cases[2], special=0.01)]
    check_cases([registers(case) for case in cases], guard=True)


def scaled(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return graph.relu(-x * 0.5)


def fused(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Computes x times a factor per row plus a scalar, with one rounding (fma)."""
    return graph.relu(vector(graph, x, -2, "of_row", x.dtype.name) * x + graph.tensor("shift", (1,), x.dtype.name))


def larger(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return graph.max(x - vector(graph, x, -1, "less", x.dtype.name), graph.abs(x))


@pytest.mark.slow
def test_pairs():
    """Two elements an instruction, NaN and infinity among them, and numbers that only just round."""
    cases = [
        registers(product(70, 40, 72, prologue, None, (dtype, dtype), special=special))
        for dtype in ("bfloat16", "float16")
        for prologue in (affine(-1, dtype), residual, scaled, fused, larger)
        for special in (0.0, 0.05)
    ]
    cases.append(registers(image((2, 24, 9, 10), (24, 24, 3, 3), affine(1, "bfloat16"), None, BOTH, padding=1)))
    for made in check_cases(cases, guard=True):
        assert made.plan is not None
        assert "Pair<" in made.plan.kernels[0].source.code


@pytest.mark.parametrize(
    ("prologue", "dtype", "expected"),
    [
        (affine(-1, "bfloat16"), "bfloat16", ["Pair<bfloat16>::fma({0}, {1}, {2})", "Pair<bfloat16>::relu({0})"]),
        (residual, "float16", ["{0} + {1}", "Pair<float16>::relu({0})"]),
        (larger, "bfloat16", ["{0} - {1}", "Pair<bfloat16>::abs({0})", "Pair<bfloat16>::maximum({0}, {1})"]),
        (affine(-1), "bfloat16", None),  # vectors of float32
        (lambda g, x: x * x * 0.5, "float16", None),  # would round twice
        (lambda g, x: (x + 1.0) * x, "bfloat16", None),
        (lambda g, x: (x * x) * 2.0 + x, "bfloat16", None),
        (lambda g, x: x * x + x * 2.0, "bfloat16", None),
        (lambda g, x: g.gelu(x), "bfloat16", None),
    ],
)
def test_pairs_round_once(prologue, dtype, expected):
    program = spec_of(product(64, 64, 64, prologue, None, (dtype, dtype))).a.program
    assert program is not None
    pairs = packed(program)
    assert (pairs and [i.template for i in pairs.instructions]) == expected


@pytest.mark.slow
def test_images():
    cases = [
        image((2, 64, 7, 7), (32, 64, 1, 1), affine(1), None, BOTH),
        image((1, 24, 11, 9), (16, 24, 3, 2), affine(1), None, BOTH, stride=(2, 1), padding=((0, 2), (1, 0))),
        image((2, 128, 9, 9), (16, 64, 3, 3), affine(1), None, BOTH, padding=2, dilation=2, groups=2),
        image((2, 24, 30), (16, 24, 5), affine(1), None, BOTH, padding=2, stride=3),
        image((1, 16, 4, 5, 6), (16, 16, 3, 3, 3), inverse, None, BOTH, padding=1),
        image((2, 80, 9, 8), (16, 80, 2, 2), inverse, None, BOTH, case={"special": 0.002}),
        image((2, 16, 9, 8), (16, 16, 3, 3), affine(0), None, BOTH, padding=1),
    ]
    graph = fg.Graph("join", io_dtype="bfloat16")
    x, seen = (graph.tensor(n, (2, 64, 8, 9), layout="channels_last") for n in ("x", "seen"))
    w = graph.tensor("w", (32, 64, 3, 3), layout="channels_last")
    graph.output(graph.conv_fprop(graph.relu_backward(x, seen), w, padding=1), name="y")
    cases.append(Case(graph, "contraction", label="two images"))
    check_cases([registers(case) for case in cases], guard=True)


@pytest.mark.slow
def test_types():
    cases = [
        product(66, 40, 80, None, dequantised(-1, "bfloat16"), ("bfloat16", "int8"), over=(False, True)),
        product(66, 40, 144, dequantised(-1, "bfloat16"), None, ("uint8", "bfloat16")),
        product(66, 40, 80, to("bfloat16"), None, ("float32", "bfloat16")),
        product(130, 40, 208, affine(-1), None, ("float16", "float16")),
        product(66, 40, 208, lambda g, x: g.cast(g.tanh(x), "float16"), None, ("float32", "float16")),
        product(66, 40, 208, None, None, ("float8_e4m3", "float16")),
        product(66, 40, 208, None, None, ("int8", "bfloat16"), batch=((2,), (2,))),
    ]
    made = check_cases([registers(case) if n < 5 else Case(case.graph, arch="sm_90a") for n, case in enumerate(cases)])
    for each in made:
        assert each.plan is not None
        assert "load_fragment<" in each.plan.kernels[-1].source.code


@pytest.mark.slow
def test_epilogues():
    """What follows the product, reductions of it, and several products of one computed operand."""
    cases = []
    for name in ("sums", "gated"):
        graph = fg.Graph(name, io_dtype="bfloat16")
        x, w, v = (graph.tensor(n, s) for n, s in (("x", (130, 72)), ("w", (72, 64)), ("v", (72, 64))))
        prologue = affine(-1)(graph, x)
        if name == "sums":
            y = graph.output(graph.gelu(prologue @ w + graph.tensor("bias", (64,))), name="y")
            graph.output(graph.reduction(y, "add", axes=0), name="sums")
        else:
            graph.output(graph.swish(prologue @ w) * (prologue @ v), name="y")
        cases.append(Case(graph, arch="sm_90a", schedule=_first, label=name))
    for made in check_cases(cases, guard=True):
        assert made.plan is not None
        assert "load_fragment<" in made.plan.kernels[0].source.code


def _first(spec: Any) -> WgmmaSchedule:
    return next(s for s in contraction_wgmma_schedule.schedules(spec, target("sm_90a")) if s.computes)


@pytest.mark.slow
def test_schedules():
    """Tiles of every height, blocks that share a tile, several tiles a block."""
    cases = [
        registers(product(64 * groups + 6, 2 * cols, 136, prologue, None, BOTH), groups=groups, tile_n=cols)
        for groups, cols, prologue in (
            (1, 64, affine(-1)), (1, 256, inverse), (2, 192, affine(-1)), (2, 256, residual), (3, 128, affine(-2))
        )
    ]  # fmt: skip
    cases += [registers(product(66, 64, 1048, affine(-1), None, BOTH), split_k=split_k) for split_k in (2, 3)]
    several = registers(product(330, 136, 72, rows_and_columns, None, BOTH), groups=1, tile_n=64)
    pick = several.schedule
    assert pick is not None
    cases.append(replace(several, schedule=lambda spec: replace(pick(spec), blocks=2)))
    check_cases(cases, guard=True)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (product(64, 64, 64, None, None), "'a' is multiplied as it lies in memory"),
        (product(64, 64, 64, affine(-1), affine(-1)), "is computed or converted: it is not in memory"),
        (product(64, 64, 72, to("bfloat16"), None, ("int8", "bfloat16")), "rows that do not start at multiples of 16"),
        (product(64, 64, 64, to("int8"), None, ("float32", "int8")), "of 16-bit elements only"),
        (image((1, 16, 9, 9), (16, 16, 3, 3), affine(-1), None, padding=1), "repeats elements along the image"),
        (gradients()[1], "is computed or converted"),
    ],
)
def test_refusals_say_why(case, reason):
    with pytest.raises(Declined, match=reason):
        computed(spec_of(case))


@pytest.mark.slow
def test_compiles_without_spills():
    sources = []
    for n, prologue in enumerate((affine(-1), rows_and_columns, lambda g, x: g.gelu(x))):
        spec = spec_of(product(4096, 256, 4096, prologue))
        for s in [s for s in contraction_wgmma_schedule.schedules(spec, target("sm_90a")) if s.computes][:2]:
            sources.append(render(replace(spec, name=f"prologue{n}_{s.groups}_{s.tile_n}_kernel"), s))
    for compiled in nvrtc.compile_kernels(sources, "sm_90a", jobs=2):
        assert compiled.spill_bytes == 0, compiled
        assert not re.search(r"C75\d\d", compiled.log), compiled.log
