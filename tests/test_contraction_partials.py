"""Reductions of contractions' results: their kernels make parts of them, in every form; and which stay whole."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from kernel_cases import Case, check_cases, executable
from test_contraction import convolution, matmul, transposed
from test_contraction_products import form, products

import fusegraph as fg
from codegen import render, target
from codegen.contraction import keeps_form
from codegen.contraction import mma_schedule as contraction_mma_schedule
from codegen.contraction import simt_schedule as contraction_simt_schedule
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.spec import ContractionSpec
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.lowering import partials
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs, run
from fusegraph.runtime import nvrtc

pytestmark = pytest.mark.usefixtures("contractions_in_one_piece")
ROWS, COLUMNS = ("add", "max"), ("min", "norm1")


def reduced(
    *wanted: tuple[Any, str], store: bool = True, keepdims: bool = True, act: str = "relu", bias: bool = True
) -> Any:
    """Returns an epilogue: bias, activation, reductions of the result along axes, and the result itself if it is
    stored.
    """

    def epilogue(graph: fg.Graph, y: fg.Tensor) -> None:
        if bias:
            y = y + graph.tensor("bias", (y.shape[-1],), y.dtype)
        y = getattr(graph, act)(y) if act else y
        if store:
            graph.output(y, name="y")
        for axes, mode in wanted:
            graph.output(graph.reduction(y, mode, axes, keepdims), name=f"{mode} {axes}")

    return epilogue


def makes_parts(count: int) -> Any:
    """Returns a check that one kernel computes the contraction and the partial results of so many reductions."""

    def check(made: Any) -> None:
        first = made.plan.kernels[0].group.lowered.spec
        assert isinstance(first, ContractionSpec)
        assert len(first.partials) == count
        assert all(
            "reduction" in n.op.name or n.op.name in ("sqrt", "div")
            for k in made.plan.kernels[1:]
            for n in k.group.nodes
        )

    return check


both = reduced((0, "add"), (1, "max"))
four = reduced((0, "amax"), (0, "avg"), (1, "norm2"), (1, "min"), keepdims=False, store=False)


# ---- every form


def test_simt():
    check_cases([matmul((70, 33), (33, 130), epilogue=both, check=makes_parts(2))], guard=True)


def test_mma():
    made = check_cases(
        [matmul((136, 40), (40, 70), "bfloat16", epilogue=both, check=makes_parts(2), **form("mma"))], guard=True
    )
    assert "mma<" in made[0].plan.kernels[0].source.code


def test_wgmma():
    cases = [
        matmul((136, 72), (72, 136), "bfloat16", epilogue=both, check=makes_parts(2), **form("wgmma")),
    ]
    made = check_cases(cases, guard=True)
    assert all("wgmma<" in exe.plan.kernels[0].source.code for exe in made)


@pytest.mark.parametrize("kind", ["simt", "mma", "wgmma"])
def test_logarithms_of_sums(kind: str) -> None:
    """A thread keeps the largest element and the sum; some columns hold nothing but infinities."""
    dtype, how = ("float32", {}) if kind == "simt" else ("bfloat16", form(kind))
    epilogue = reduced((0, "logaddexp"), (1, "logaddexp"), act="", store=False, keepdims=False)
    shapes = ((70, 33), (33, 130)) if kind == "simt" else ((136, 72), (72, 136))
    case = matmul(*shapes, dtype, epilogue=epilogue, check=makes_parts(2), **how)
    inputs = random_inputs(case.graph, np.random.default_rng(0))
    inputs["bias"] = inputs["bias"].copy()
    inputs["bias"][[0, 40, 41, 90]] = -np.inf, np.inf, np.inf, np.nan
    (made,) = check_cases([replace(case, inputs=inputs)], guard=True)
    assert "Exponentials" in made.plan.kernels[0].source.code


@pytest.mark.slow
def test_results_that_threads_carry():
    """Rows of the result at odd addresses: what the warps have of columns is not overwritten before it is read."""
    several = reduced((0, "add"), (0, "max"), (1, "min"))
    how = {"epilogue": several, "check": makes_parts(3), **form("wgmma", blocks=1)}
    cases = [matmul((136, 72), (72, 135), "bfloat16", b_strides=(1, 72), **how)]
    for exe in check_cases(cases, guard=True):
        assert "load_results" in exe.plan.kernels[0].source.code


def random_case(r: random.Random, dtype: str, kind: str) -> Case:
    m, n, k = r.choice((1, 7, 64, 65, 130, 200)), r.choice((1, 8, 33, 64, 136, 260)), r.choice((8, 72, 264))
    if kind == "wgmma":
        m, n = m + -m % 8, n + -n % 8
    floats = not dtype.startswith(("int", "uint"))
    modes = ("add", "max", "min", "amax", "norm1", *(("avg", "norm2", "mul") if floats else ()))
    wanted = {(r.choice((0, 1, 0, 1, None)), r.choice(modes)) for _ in range(r.randint(1, 4))}
    epilogue = reduced(*sorted(wanted, key=str), store=r.random() < 0.6, keepdims=r.random() < 0.7, bias=floats)
    along = kind == "wgmma" and dtype.startswith(("float8", "int", "uint"))
    strides = {"b_strides": transposed((k, n))} if along or r.random() < 0.5 else {}
    if along:
        k += -k % 16
        strides = {"b_strides": transposed((k, n))}
    how = (
        form(kind, any_of=r)
        if kind != "simt"
        else {"schedule": lambda spec: r.choice(contraction_simt_schedule.schedules(spec))}
    )
    return matmul((m, k), (k, n), dtype, epilogue=epilogue, special=r.choice((0.0, 0.0, 0.02)), **strides, **how)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simt", "mma", "wgmma"])
def test_random_products_and_schedules(kind):
    r = random.Random(7)
    dtypes = {
        "simt": ("float32", "float64", "int64", "int32", "float16"),
        "mma": ("bfloat16", "float16", "int8", "float8_e4m3"),
        "wgmma": ("bfloat16", "float16", "bfloat16", "int8", "float8_e5m2"),
    }[kind]
    made = check_cases([random_case(r, dtypes[number % len(dtypes)], kind) for number in range(5)], guard=True)
    specs = [exe.plan.kernels[0].group.lowered.spec for exe in made]
    assert sum(bool(getattr(spec, "partials", ())) for spec in specs) >= 2


@pytest.mark.usefixtures("tiled_gradients")
@pytest.mark.slow
def test_convolutions():
    def channels(graph: fg.Graph, y: fg.Tensor) -> None:
        z = graph.relu(y + graph.tensor("bias", (1, y.shape[1], 1, 1), y.dtype))
        graph.output(z, name="y")
        graph.output(graph.reduction(z, "add", (0, 2, 3)), name="sums")
        graph.output(graph.reduction(z * z, "add", (0, 2, 3)), name="squares")
        graph.output(graph.reduction(z, "max", 1), name="best")

    def means(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(graph.reduction(graph.relu(y), "avg", (2, 3)), name="means")

    lasts = {"layout": "channels_last", "filters": "channels_last"}
    cases = []
    for kind in ("wgmma", "mma"):
        one = {"case": {"check": makes_parts(1), **form(kind)}, **lasts}
        three = {"case": {"check": makes_parts(3), **form(kind)}, **lasts}
        cases += [
            convolution((2, 64, 9, 8), (72, 64, 3, 3), "bfloat16", padding=1, epilogue=channels, **three),
            convolution((2, 64, 8, 8), (72, 64, 3, 3), "float16", padding=1, epilogue=means, **one),
        ]
    gather = {"case": {"check": makes_parts(3), **form("wgmma", lambda s: s.gather)}, **lasts}
    cases.append(convolution((2, 8, 14, 14), (64, 8, 5, 5), "bfloat16", epilogue=channels, **gather))
    plain = {"case": {"check": makes_parts(3)}}
    cases.append(convolution((2, 6, 9, 8), (20, 6, 3, 3), padding=1, epilogue=channels, **plain))
    cases.append(
        convolution((2, 12, 9, 8), (20, 6, 3, 3), padding=1, groups=2, epilogue=grouped, case={"check": makes_parts(1)})
    )
    cases += [Case(gradient(g), "contraction", check=makes_parts(1)) for g in ("dgrad", "wgrad")]
    check_cases(cases, guard=True)


def grouped(graph: fg.Graph, y: fg.Tensor) -> None:
    graph.output(graph.reduction(y, "add", (0, 2, 3)), name="sums")


def gradient(which: str) -> fg.Graph:
    graph = fg.Graph(which)
    image, loss, w = (2, 12, 5, 6), (2, 6, 5, 6), (6, 12, 3, 3)
    if which == "dgrad":
        y = graph.conv_dgrad(graph.tensor("loss", loss), graph.tensor("w", w), size=image[2:], padding=1)
        graph.output(graph.reduction(y, "add", (0, 2, 3)), name="sums")
    else:
        y = graph.conv_wgrad(graph.tensor("x", image), graph.tensor("loss", loss), taps=(3, 3), padding=1)
        graph.output(graph.reduction(y, "norm2", (1, 2, 3)), name="norms")
    return graph


@pytest.mark.slow
def test_batches_clusters_products_and_persistent_blocks():
    wgmma = form("wgmma", lambda s: s.split_k == 2)
    batched = reduced((1, "add"), (2, "max"), bias=False)
    cases = [
        matmul((136, 2072), (2072, 128), "bfloat16", epilogue=four, check=makes_parts(4), **wgmma),
        matmul((300, 64), (64, 200), "bfloat16", epilogue=both, check=makes_parts(2), **form("wgmma", blocks=2)),
        matmul((3, 70, 40), (3, 40, 72), "bfloat16", epilogue=batched, check=makes_parts(2), **form("wgmma")),
        matmul((3, 70, 40), (3, 40, 72), "bfloat16", epilogue=batched, check=makes_parts(2), **form("mma")),
        matmul((3, 70, 40), (3, 40, 72), epilogue=batched, check=makes_parts(2)),
        matmul((3, 64, 40), (40, 72), epilogue=reduced((1, "add"), bias=False), check=makes_parts(1)),
        matmul((3, 64, 40), (40, 72), epilogue=reduced(((0, 1), "add"), bias=False), check=makes_parts(1)),
    ]
    gated = reduced((0, "add"), (1, "max"), bias=False)
    meet = lambda graph, a, b: gated(graph, a * b)  # noqa: E731
    cases += [
        replace(products(136, 72, 72, dtype, epilogue=meet, **how), check=makes_parts(2))
        for dtype, how in (("bfloat16", form("wgmma")), ("bfloat16", form("mma")), ("float32", {}))
    ]
    check_cases(cases, guard=True)


def test_extremes_of_results_as_small_integers():
    """A type that nothing is added up in: the largest and the smallest are made in it."""

    def small(graph: fg.Graph, y: fg.Tensor) -> None:
        for number, dtype in enumerate(("int8", "uint8")):
            graph.output(graph.reduction(graph.cast(y * 8, dtype), "max", number), name=dtype)

    cases = [matmul((72, 40), (40, 96), "bfloat16", epilogue=small, **form(kind)) for kind in ("wgmma", "mma")]
    cases.append(matmul((72, 40), (40, 96), "float32", epilogue=small))
    check_cases([replace(case, check=makes_parts(2)) for case in cases], guard=True)


@pytest.mark.slow
def test_parts_do_not_depend_on_the_schedule():
    """Hopper's kernels add up a part in the same order whatever their tiles are."""
    case = matmul((200, 72), (72, 136), "bfloat16", epilogue=reduced((0, "add"), (1, "add")))
    found = []
    for groups, cols in ((1, 64), (3, 192)):
        how = form("wgmma", lambda s, g=groups, c=cols: (s.groups, s.tile_n) == (g, c))
        exe = executable(replace(case, **how))
        found.append(run(exe, random_inputs(case.graph, 1)))
    for name in ("add 0", "add 1"):
        assert found[0][name].tobytes() == found[1][name].tobytes()


# ---- what is split, and what is not


def kinds(graph: fg.Graph) -> list[list[str]]:
    return [[node.op.name for node in kernel.group.nodes] for kernel in plan(graph).kernels]


def rows_of(graph: fg.Graph, y: fg.Tensor) -> None:
    graph.output(graph.softmax(y), name="y")


def test_sums_of_joined_rows() -> None:
    graph = fg.Graph("joined")
    y = graph.output(graph.relu(graph.matmul(graph.tensor("x", (4, 32, 16)), graph.tensor("w", (16, 48)))), name="y")
    graph.output(graph.reduction(graph.reshape(y, (128, 48)), "add", [0]), name="sums")
    assert kinds(graph)[0][-1] == "reduction_partial"
    assert check_executable(CpuExecutable(graph, Options())).ok


def test_rows_that_are_read_again_stay_whole():
    assert kinds(matmul((512, 64), (64, 512), epilogue=rows_of).graph)[0] == ["matmul"]
    assert not any("reduction_partial" in k for k in kinds(matmul((512, 64), (64, 512), epilogue=rows_of).graph))


def test_statistics_of_few_columns_are_made_before_what_follows():
    """Columns too long for a kernel that reads them once are read once less."""

    def normalized(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(y - graph.reduction(y, "avg", 0), name="y")

    found = kinds(matmul((1 << 15, 32), (32, 64), epilogue=normalized).graph)
    assert found == [["matmul", "reduction_partial"], ["reduction", "div"], ["sub"]]


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((2, 64, 8, 8), (0, 2, 3), True),
        ((2, 64, 8, 8), (2, 3), True),
        ((2, 64, 9, 8), (2, 3), False),  # 72 rows an image: chunks of 64 would reach into the next one
        ((2, 64, 8, 8), (0,), False),  # not the last of the rows
        ((2, 64, 8, 8), (1,), True),
        ((2, 64, 8, 8), (0, 1, 2, 3), True),  # parts are combined along all axes at once
        ((8, 64, 64, 64), (0, 1, 2, 3), True),
    ],
)
def test_axes(shape, axes, expected):
    def sums(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(graph.reduction(y, "add", axes), name="y")

    found = kinds(convolution(shape, (64, 64, 1, 1), epilogue=sums, layout="channels_last").graph)
    assert ("reduction_partial" in found[0]) == expected


def test_direct_convolutions_and_phases_stay_whole():
    for filters, groups in (((64, 1, 3, 3), 64),):
        case = convolution((2, 64, 8, 8), filters, groups=groups, padding=1, epilogue=grouped)
        assert not any("reduction_partial" in k for k in kinds(case.graph))
    graph = fg.Graph("strided")
    y = graph.conv_dgrad(
        graph.tensor("loss", (2, 20, 8, 8)), graph.tensor("w", (20, 12, 3, 3)), size=(16, 16), stride=2, padding=1
    )
    grouped(graph, y)
    assert not any("reduction_partial" in k for k in kinds(graph))


def test_more_reductions_than_a_kernel_makes_parts_of():
    wanted = [(axes, mode) for axes in (0, 1) for mode in ("add", "max", "min")]
    found = kinds(matmul((128, 64), (64, 128), epilogue=reduced(*wanted)).graph)
    assert found[0].count("reduction_partial") == partials.MOST_PARTIALS
    assert sum(k.count("reduction_partial") for k in found) == partials.MOST_PARTIALS


def test_a_slower_form_of_kernel_is_no_bargain(monkeypatch):
    graph = matmul((128, 64), (64, 128), "bfloat16", epilogue=both).graph
    assert "reduction_partial" in kinds(graph)[0]
    monkeypatch.setattr("fusegraph.passes.reduce_results.keeps_form", lambda *_: False)
    assert not any("reduction_partial" in k for k in kinds(graph))


def spec_of(case: Case, name: str) -> ContractionSpec:
    made = executable(replace(case, arch="sm_90a", schedule=None)).plan
    (spec,) = (k.group.lowered.spec for k in made.kernels if isinstance(k.group.lowered.spec, ContractionSpec))
    assert spec.partials
    return replace(spec, name=name)


def test_ragged_tensor_core_products_keep_their_form():
    for m, n, k in ((4095, 4001, 509), (4096, 17, 4096), (16, 4096, 4096), (8192, 64, 31)):
        assert keeps_form(spec_of(matmul((m, k), (k, n), "bfloat16", epilogue=both), "product"), target("sm_90a")), (
            m,
            n,
            k,
        )


# ---- sources


def stem() -> Case:
    def statistics(graph: fg.Graph, y: fg.Tensor) -> None:
        z = graph.relu(y + graph.tensor("bias", (1, y.shape[1], 1, 1), y.dtype))
        graph.output(z, name="y")
        graph.output(graph.reduction(z, "add", (0, 2, 3), dtype="float32"), name="sums")

    return convolution(
        (64, 64, 56, 56),
        (64, 64, 3, 3),
        "bfloat16",
        padding=1,
        epilogue=statistics,
        layout="channels_last",
        filters="channels_last",
    )


def test_golden_source():
    kernel = executable(replace(stem(), arch="sm_90a")).plan.kernels[0]
    check_golden("conv_sums_hopper", kernel.source.code)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_spills(arch):
    module = contraction_wgmma_schedule if arch == "sm_90a" else contraction_mma_schedule
    large = [
        matmul((8192, 8192), (8192, 8192), "bfloat16", epilogue=both),
        matmul((8192, 8192), (8192, 8192), "bfloat16", epilogue=four),
        stem(),
    ]
    sources = []
    for number, case in enumerate(large):
        spec = spec_of(case, "case")
        for n, s in enumerate(module.schedules(spec, target(arch))[:1]):
            sources.append(render(replace(spec, name=f"case{number}_{n}_kernel"), s))
    spec = spec_of(matmul((512, 512), (512, 512), epilogue=four), "case")
    for n, s in enumerate(contraction_simt_schedule.schedules(spec)[:1]):
        sources.append(render(replace(spec, name=f"simt{n}_kernel"), s))
    for compiled in nvrtc.compile_kernels(sources, arch, jobs=2):
        assert compiled.spill_bytes == 0, compiled
        assert not re.search(r"C75\d\d", compiled.log), compiled.log
