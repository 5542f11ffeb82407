"""Prologues, pointwise nodes in front of a contraction, computed as its tiles are filled: every form of kernel on
the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_on_gpu
from kernel_cases import Case, check_cases, executable
from test_contraction import transposed

import fusegraph as fg
from codegen import render, schedules, target
from codegen.contraction import mma_schedule as contraction_mma_schedule
from codegen.contraction import simt_schedule as contraction_simt_schedule
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.spec import ContractionSpec
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.runtime import nvrtc

Prologue = Callable[[fg.Graph, fg.Tensor], fg.Tensor]
pytestmark = pytest.mark.usefixtures("contractions_in_one_piece", "prologues_in_products")
#: The forms of kernel, and the architecture that each is run for.
FORMS = {"simt": "sm_80", "mma": "sm_80", "wgmma": "sm_90a"}


# ---- prologues


def vector(graph: fg.Graph, x: fg.Tensor, axis: int, name: str, dtype: str = "float32") -> fg.Tensor:
    """Adds an input that varies along one axis of a tensor."""
    return graph.tensor(name, tuple(n if d == axis % x.rank else 1 for d, n in enumerate(x.shape)), dtype)


def affine(axis: int, dtype: str = "float32") -> Prologue:
    """Returns a prologue relu(x * scale + bias), with scale and bias along an axis, as a batch norm before a
    convolution.
    """

    def prologue(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
        scale, bias = (vector(graph, x, axis, f"{x.name}_{name}", dtype) for name in ("scale", "bias"))
        return graph.cast(graph.relu(x * scale + bias), x.dtype)

    return prologue


def residual(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return graph.relu(x + graph.tensor(f"{x.name}_residual", x.shape, x.dtype))


def apart(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Multiplies by a second tensor in transposed layout and adds a scalar."""
    other = graph.tensor(f"{x.name}_other", x.shape, x.dtype, strides=transposed(x.shape))
    return graph.cast(x * other + graph.tensor(f"{x.name}_shift", (1,), "float32"), x.dtype)


def positions(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Negates all elements left of the diagonal, by their indices."""
    row, col = graph.gen_index(x, axis=-2), graph.gen_index(x, axis=-1)
    return graph.binary_select(x, graph.neg(x), graph.cmp_le(row, col))


def inverse(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Computes 1 / (|x| + 0.5), which is not zero where x is padded with zeros."""
    return graph.cast(graph.reciprocal(graph.abs(x) + 0.5), x.dtype)


def to(dtype: str) -> Prologue:
    return lambda graph, x: graph.cast(x, dtype)


def dequantised(axis: int, dtype: str) -> Prologue:
    """Returns a prologue that multiplies an integer weight by a scale per filter or per channel."""
    return lambda graph, x: graph.cast(x * vector(graph, x, axis, f"{x.name}_scale"), dtype)


# ---- contractions


def form(case: Case, name: str, **wanted: Any) -> Case:
    """Returns the case in a form of kernel, with the first schedule that has the given fields."""
    arch = FORMS[name]

    def schedule(spec: ContractionSpec) -> Any:
        every: Sequence[Any] = contraction_simt_schedule.schedules(spec)
        if name != "simt":
            module = contraction_mma_schedule if name == "mma" else contraction_wgmma_schedule
            every = module.schedules(spec, target(arch))
        return next(s for s in every if all(getattr(s, key) == value for key, value in wanted.items()))

    def check(made: CpuExecutable) -> None:
        assert made.plan is not None
        (kernel,) = made.plan.kernels
        spec = kernel.group.lowered.spec
        assert isinstance(spec, ContractionSpec)
        assert spec.a.program is not None or spec.b.program is not None
        assert {"simt": "_tile[2]", "mma": "mma<", "wgmma": "wgmma<"}[name] in kernel.source.code

    return replace(case, arch=arch, schedule=schedule, check=check, label=f"{name} {wanted} {case.label}")


def product(
    m: int,
    n: int,
    k: int,
    first: Prologue | None,
    second: Prologue | None = None,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    *,
    over: tuple[bool, bool] = (False, False),
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    **case: Any,
) -> Case:
    graph = fg.Graph("prologue")
    shapes = (*batch[0], m, k), (*batch[1], k, n)
    a, b = (
        graph.tensor(name, shape, dtype, strides=transposed(shape) if turned else None)
        for name, shape, dtype, turned in zip("ab", shapes, dtypes, over)
    )
    x = first(graph, a) if first else a
    y = second(graph, b) if second else b
    graph.output(x @ y, name="y")
    return Case(graph, "contraction", label=f"{m} {n} {k} {over} {batch}", **case)


def image(
    x: tuple[int, ...],
    w: tuple[int, ...],
    first: Prologue | None,
    second: Prologue | None = None,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    *,
    layout: str = "channels_last",
    case: dict[str, Any] | None = None,
    **attributes: Any,
) -> Case:
    graph = fg.Graph("prologue")
    source = graph.tensor("x", x, dtypes[0], layout=layout)
    taps = graph.tensor("w", w, dtypes[1], layout=layout)
    y = graph.conv_fprop(
        first(graph, source) if first else source, second(graph, taps) if second else taps, **attributes
    )
    graph.output(y, name="y")
    return Case(graph, "contraction", label=f"{x} {w} {layout} {attributes}", **(case or {}))


def products(dtype: str) -> list[Case]:
    """Returns products with a prologue of one operand or both, in sizes that are not multiples of a tile."""
    pair = (dtype, dtype)
    cases = [
        product(70, 40, 72, affine(-1), None, pair),
        product(130, 24, 136, affine(-2, dtype), None, pair),
        product(65, 72, 64, residual, None, pair, over=(False, True)),
        product(72, 56, 80, apart, None, pair, over=(True, False)),
        product(33, 40, 24, None, affine(-1), pair),
        product(40, 48, 88, None, residual, pair, over=(False, True)),
        product(64, 136, 72, inverse, affine(-2), pair, over=(True, True)),
        product(7, 9, 13, affine(-1), apart, pair),
        product(1, 1, 2, inverse, inverse, pair),
        product(66, 24, 40, positions, None, pair),
        product(24, 16, 72, affine(-1), None, pair, batch=((3,), (3,))),
        product(24, 16, 40, affine(-3), affine(-1), pair, batch=((2, 3), (3,))),
        product(24, 16, 40, residual, None, pair, batch=((2, 3), ())),
    ]
    return cases


@pytest.mark.parametrize("name", ["mma", "wgmma"])
def test_products(name):
    check_cases([form(case, name) for case in products("bfloat16")[:2]], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_more_products(name):
    every = [*products("float32")[::2], *products("float64")[1::4]] if name == "simt" else products("float16")
    every = [case for case in every if name != "wgmma" or "7 9 13" not in case.label]  # not a whole vector in a row
    check_cases([form(case, name) for case in every], guard=True)


IMAGES: list[tuple[Any, Any, dict[str, Any]]] = [
    ((2, 16, 9, 10), (24, 16, 3, 3), {"padding": 1}),
    ((1, 24, 11, 9), (16, 24, 3, 2), {"stride": (2, 1), "padding": ((0, 2), (1, 0))}),
    ((2, 16, 9, 9), (16, 8, 3, 3), {"padding": 2, "dilation": 2, "groups": 2}),
    ((2, 24, 30), (16, 24, 5), {"padding": 2, "stride": 3, "mode": "convolution"}),
    ((1, 16, 4, 5, 6), (16, 16, 3, 3, 3), {"padding": 1}),
    ((2, 64, 7, 7), (32, 64, 1, 1), {}),
]


def images(dtype: str) -> list[Case]:
    pair = (dtype, dtype)
    cases = [image(x, w, affine(1), None, pair, **more) for x, w, more in IMAGES]
    cases += [image(x, w, None, affine(0), pair, **more) for x, w, more in IMAGES[:2]]
    cases += [image((2, 64, 9, 10), (24, 64, 3, 3), None, affine(0), pair, padding=1, stride=2)]  # by im2col
    cases += [image((1, 128, 7, 8), (40, 64, 3, 2), None, residual, pair, padding=1, groups=2)]
    cases += [image(x, w, inverse, inverse, pair, **more) for x, w, more in IMAGES[:3]]
    cases += [image(x, w, affine(-1), None, pair, **more) for x, w, more in IMAGES[:2]]
    cases += [image(x, w, residual, None, pair, **more) for x, w, more in IMAGES[1:2]]
    cases += [image((1, 13, 8, 9), (10, 13, 3, 3), affine(1), None, pair, padding=1)]
    cases += [image((1, 12, 8, 9), (16, 12, 3, 3), affine(1), residual, pair, padding=1, layout="contiguous")]
    cases += [image((1, 16, 8, 9), (16, 16, 3, 3), positions, None, pair, padding=1)]
    return cases


@pytest.mark.parametrize("name", ["wgmma", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simt", "mma"))])
def test_an_image_is_padded_with_zeros_after_its_prologue(name):
    """With a bias in front, and infinities: relu(bias) and NaN do not leak in from beyond the border."""
    dtype = "float32" if name == "simt" else "bfloat16"
    more = {"case": {"special": 0.01}}
    x, w, attributes = IMAGES[0]
    case = image(x, w, affine(1), None, (dtype, dtype), **attributes, **more)
    check_cases([form(case, name)], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_images(name):
    every = images("float32")[::2] if name == "simt" else images("float16")
    every += [replace(case, special=0.002) for case in every[:2]]
    if name == "wgmma":  # wants vectors of channels
        every = [case for case in every if "contiguous" not in case.label and "13" not in case.label]
    check_cases([form(case, name) for case in every], guard=True)


def gradients() -> list[Case]:
    """Returns both gradients of a convolution, with the gradient of the activation after it as a prologue."""
    cases = []
    for x, w, more in (
        ((2, 24, 9, 10), (16, 24, 3, 3), {"padding": 1}),
        ((2, 64, 9, 11), (16, 64, 3, 3), {"padding": ((0, 1), (2, 0)), "stride": 2}),
        ((1, 32, 8, 8), (16, 16, 1, 3), {"groups": 2, "dilation": 2}),
    ):
        forward = fg.Graph("forward")
        y = forward.conv_fprop(forward.tensor("x", x), forward.tensor("w", w), **more)
        for op in ("conv_dgrad", "conv_wgrad"):
            graph = fg.Graph(op, io_dtype="bfloat16")
            loss, seen = (graph.tensor(name, y.shape, layout="channels_last") for name in ("loss", "seen"))
            factor = graph.relu_backward(loss, seen)
            if op == "conv_dgrad":
                weights = graph.tensor("w", w, layout="channels_last")
                result = graph.conv_dgrad(factor, affine(1)(graph, weights), size=x[2:], **more)
            else:
                source = affine(1)(graph, graph.tensor("x", x, layout="channels_last"))
                result = graph.conv_wgrad(source, factor, taps=w[2:], **more)
            graph.output(result, name="gradient")
            cases.append(Case(graph, "contraction", label=f"{op} {x} {w} {more}"))
    return cases


@pytest.mark.usefixtures("tiled_gradients")
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_gradients(name):
    every = gradients()
    if name == "wgmma":  # phases of a strided convolution are none of its
        every = [case for case in every if "conv_dgrad" not in case.label or "stride" not in case.label]
    check_cases([form(case, name) for case in every], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mma", "wgmma"])
def test_types(name):
    cases = [
        product(66, 40, 72, None, dequantised(-1, "bfloat16"), ("bfloat16", "int8")),
        product(40, 66, 80, None, dequantised(-2, "float16"), ("float16", "int8"), over=(False, True)),
        product(66, 40, 72, to("bfloat16"), None, ("float32", "bfloat16")),
        product(66, 40, 72, None, to("float16"), ("float16", "float64"), over=(False, True)),
        product(66, 40, 72, affine(-1), to("bfloat16"), ("float8_e4m3", "int64")),
        product(66, 40, 72, to("int8"), None, ("float32", "int8")),
        product(66, 40, 96, to("float8_e4m3"), None, ("bfloat16", "float8_e4m3"), over=(False, True)),
        image((1, 16, 9, 9), (16, 16, 3, 3), to("bfloat16"), dequantised(0, "bfloat16"), ("uint8", "int8"), padding=1),
    ]
    tf32 = fg.Graph("tf32", compute_dtype="tf32")
    x, w = tf32.tensor("x", (66, 72)), tf32.tensor("w", (72, 40))
    tf32.output(affine(-1)(tf32, x) @ w, name="y")
    strict = replace(cases[0], options=Options(strict=True))
    check_cases([form(case, name) for case in (*cases, Case(tf32, "contraction"), strict)], guard=True)


@pytest.mark.slow
def test_operands_of_two_types_on_hopper():
    """Converted by the threads that bring them, without any node in front."""
    cases = []
    for dtypes in (("bfloat16", "int8"), ("float8_e5m2", "float16"), ("float16", "bfloat16")):
        case = product(66, 40, 72, None, None, dtypes, over=(False, True))
        pick = lambda spec: contraction_wgmma_schedule.schedules(spec, target("sm_90a"))[0]  # noqa: E731
        cases.append(replace(case, arch="sm_90a", schedule=pick))
    for made in check_cases(cases, guard=True):
        assert made.plan is not None
        assert "wgmma<" in made.plan.kernels[0].source.code


@pytest.mark.slow
def test_schedules():
    """Tiles of every height, both numbers of filling warpgroups, several tiles a block, blocks that share a tile.

    Threads fill the tiles of rows that do not start at multiples of 16 bytes, or of both operands.
    """
    cases = [
        form(
            product(64 * groups + 6, 2 * cols, 132, first, second), "wgmma",
            groups=groups, tile_n=cols, producer_warpgroups=n)
        for groups, cols, n, first, second in (
            (1, 64, 1, affine(-1), None), (1, 256, 2, affine(-1), None), (1, 64, 2, affine(-1), affine(-1)),
            (2, 192, 2, affine(-1), None), (2, 256, 1, affine(-1), None), (3, 128, 1, inverse, None),
        )
    ]  # fmt: skip
    deep = product(66, 64, 1044, affine(-1))
    cases += [form(deep, "wgmma", split_k=split_k) for split_k in (2, 3)]
    for case in (product(330, 136, 72, affine(-1), residual), product(330, 136, 64, None, affine(-1))):
        several = form(case, "wgmma", groups=1, tile_n=64)
        pick = several.schedule
        assert pick is not None
        cases.append(replace(several, schedule=lambda spec, pick=pick: replace(pick(spec), blocks=2)))
    cases += [form(product(70, 40, 200, residual, affine(-1)), "mma", stages=stages) for stages in (2, 3, 4)]
    check_cases(cases, guard=True)


@pytest.mark.slow
def test_an_image_still_comes_by_tma():
    """Where the filter is what is computed."""
    case = image((1, 64, 9, 9), (32, 64, 3, 3), None, dequantised(0, "bfloat16"), ("bfloat16", "int8"), padding=1)
    (made,) = check_cases([form(case, "wgmma")])
    assert made.plan is not None
    assert "tma_load_im2col(shared.a" in made.plan.kernels[0].source.code


def test_nothing_to_multiply():
    check_cases([product(m, n, k, affine(-1)) for m, n, k in ((0, 5, 4), (5, 0, 4), (5, 4, 0))])


# ---- sources


def large(name: str) -> fg.Graph:
    """Returns a large problem with a prologue, which takes one kernel."""
    graph = fg.Graph(name, io_dtype="bfloat16")
    if name == "image":
        x, w = (graph.tensor(n, s, layout="NHWC") for n, s in (("x", (64, 256, 56, 56)), ("w", (256, 256, 1, 1))))
        graph.output(graph.conv_fprop(affine(1)(graph, x), w), name="y")
        return graph
    rows, columns = (256, 4096) if name == "weights" else (4096, 256)  # one tile across what is computed
    a = graph.tensor("a", (rows, 4096))
    b = graph.tensor("b", (4096, columns), "int8" if name == "weights" else None)
    first = {"affine": affine(-1), "residual": residual}.get(name)
    second = dequantised(-1, "bfloat16") if name == "weights" else None
    graph.output((first(graph, a) if first else a) @ (second(graph, b) if second else b), name="y")
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_spills(arch):
    sources = []
    for name in ("image", "affine", "residual", "weights"):
        (kernel,) = plan(large(name)).kernels
        spec = kernel.group.lowered.spec
        every = schedules(spec, target(arch))
        for n, s in enumerate(every[: 2 if arch == "sm_90a" else 1]):
            sources.append(render(replace(spec, name=f"{name}_{n}_kernel"), s))
    for compiled in nvrtc.compile_kernels(sources, arch, jobs=2):
        assert compiled.spill_bytes == 0, compiled
        assert not re.search(r"C75\d\d", compiled.log), compiled.log


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_the_device(dtype):
    check_on_gpu([case.graph for case in (*products(dtype), *images(dtype), *gradients())])


@pytest.mark.slow
def test_an_operand_is_rounded_as_if_it_were_stored():
    """The same bits as with the operand in memory: fusion changes nothing but the traffic."""
    case = product(24, 16, 8, affine(-1))
    inputs = {"a": np.linspace(-2, 2, 24 * 8).reshape(24, 8), "b": np.linspace(-1, 1, 8 * 16).reshape(8, 16)}
    inputs |= {"a_scale": np.linspace(0.3, 1.7, 8).reshape(1, 8), "a_bias": np.linspace(-0.1, 0.2, 8).reshape(1, 8)}
    arrays = [inputs[t.name].astype(t.dtype.numpy) for t in case.graph.inputs]
    results = [CpuExecutable(case.graph, Options(), fusion=fusion)(*arrays) for fusion in (True, False)]
    assert np.asarray(results[0]).tobytes() == np.asarray(results[1]).tobytes()


def test_golden_source():
    (kernel,) = executable(Case(large("image"), arch="sm_90a")).plan.kernels
    check_golden("prologue_hopper", kernel.source.code)


def test_what_varies_along_a_turned_around_filter_is_read_from_its_last_tap() -> None:
    graph = fg.Graph("turned")
    x = graph.tensor("x", (2, 64, 12, 12), "float16", strides=(64 * 144, 1, 64 * 12, 64))
    w, s = (graph.tensor(n, (k, 64, 3, 3), "float16", strides=(576, 1, 192, 64)) for n, k in (("w", 64), ("s", 1)))
    graph.output(graph.conv_fprop(x, w * s, mode="convolution"))
    (kernel,) = plan(graph, Options(target=target("sm_80"))).kernels
    reads = [line for line in kernel.source.code.splitlines() if "(s + (" in line]
    assert reads
    assert all("(s + (512 - " in line for line in reads), kernel.source.code
