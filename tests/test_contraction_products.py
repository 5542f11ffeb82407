"""Contractions with several operands B, such as SwiGLU: one kernel in every form, and which graphs have one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from golden_files import check_golden
from kernel_cases import Case, check_cases, executable
from test_contraction import transposed

import fusegraph as fg
from codegen import render, target
from codegen.contraction import mma_schedule as contraction_mma_schedule
from codegen.contraction import simt_schedule as contraction_simt_schedule
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.contraction.simt_schedule import TILES
from codegen.spec import ContractionSpec
from fusegraph.plan import plan
from fusegraph.runtime import nvrtc

Epilogue = Callable[..., None]


def swiglu(graph: fg.Graph, gate: fg.Tensor, up: fg.Tensor) -> None:
    graph.output(graph.swish(gate) * up, name="y")


def everything(graph: fg.Graph, *values: fg.Tensor) -> None:
    """An epilogue with several outputs, one of which is a product itself; operands broadcast along rows and along
    columns.
    """
    first, *others = values
    column = graph.tensor("column", (*first.shape[:-1], 1), "float32")
    row = graph.tensor("row", (first.shape[-1],), first.dtype)
    total = first + column
    for k, other in enumerate(others):
        total = graph.max(total, other * row) if k else total * other
    graph.output(total, name="total")
    graph.output(graph.identity(others[-1]), name="last")
    graph.output(graph.cast(first - others[0], "float32"), name="difference")


def products(
    m: int,
    n: int,
    k: int,
    dtype: Any = "float32",
    second: Any = None,
    *,
    count: int = 2,
    across: bool = False,
    along: bool = False,
    epilogue: Epilogue = swiglu,
    lead: tuple[int, ...] = (),
    **case: Any,
) -> Case:
    """Returns ``count`` products that share operand A.

    ``across``: operand A is stored transposed; ``along``: the B operands are.
    """
    graph = fg.Graph("products")
    a_shape, b_shape = (*lead, m, k), (*lead, k, n)
    x = graph.tensor("x", a_shape, dtype, strides=transposed(a_shape) if across else None)
    strides = transposed(b_shape) if along else None
    operands = [graph.tensor(f"w{d}", b_shape, second or dtype, strides=strides) for d in range(count)]
    epilogue(graph, *(graph.matmul(x, w) for w in operands))
    return Case(graph, "contraction", check=lambda made: one_kernel(made.plan), **case)


def convolutions(
    x: tuple[int, ...], w: tuple[int, ...], dtype: str, *, case: dict[str, Any] | None = None, **attributes: Any
) -> Case:
    """Returns a gated convolution with all operands in channels last."""
    graph = fg.Graph("gated")
    image = graph.tensor("x", x, dtype, layout="channels_last")
    gate, up = (
        graph.conv_fprop(image, graph.tensor(name, w, dtype, layout="channels_last"), **attributes)
        for name in ("gate", "up")
    )
    bias = graph.tensor("bias", (1, w[0], *(1 for _ in w[2:])), dtype)
    graph.output(graph.sigmoid(gate + bias) * up, name="y")
    return Case(graph, "contraction", check=lambda made: one_kernel(made.plan), **(case or {}))


def one_kernel(made: Any) -> None:
    (kernel,) = made.kernels
    assert kernel.group.lowered.spec.products > 1


def form(
    name: str, pick: Callable[[Any], bool] = lambda _: True, any_of: random.Random | None = None, **fields: Any
) -> dict[str, Any]:
    """Returns fields of a case that runs with the first "mma" or "wgmma" schedule that the predicate accepts (by
    default any).
    """
    module = {"mma": contraction_mma_schedule, "wgmma": contraction_wgmma_schedule}[name]

    def schedule(spec: ContractionSpec) -> Any:
        every = [s for s in module.schedules(spec, target("sm_90a")) if pick(s)]
        assert every
        return replace(any_of.choice(every) if any_of else every[0], **fields)

    return {"schedule": schedule, "arch": "sm_90a"}


# ---- single threads


def ungated(graph: fg.Graph, *values: fg.Tensor) -> None:
    total = values[0]
    for value in values[1:]:
        total = graph.max(total, value)
    graph.output(total, name="y")


def test_simt():
    cases = [
        products(65, 33, 17),
        products(20, 24, 9, count=4, epilogue=everything, lead=(2,), across=True, along=True),
    ]
    check_cases(cases, guard=True)


@pytest.mark.slow
def test_simt_tiles():
    cases = [
        products(1, 1, 2, "float64"),
        products(9, 0, 4),
        products(40, 7, 0, epilogue=everything),
        products(33, 66, 20, "int8", count=3, epilogue=ungated),
    ]
    cases += [products(70, 65, 33, "int64", count=3, epilogue=ungated)]
    for number in range(len(TILES)):
        for count in (2 + number % 3,):
            kind = {"across": bool(number & 1), "along": bool(number & 2), "epilogue": everything}
            nth = lambda spec, n=number: (every := contraction_simt_schedule.schedules(spec))[n % len(every)]  # noqa: E731
            cases.append(products(70, 133, 21, count=count, schedule=nth, **kind))
    cases.append(convolutions((2, 12, 7, 6), (10, 12, 3, 2), "float32", padding=1, stride=(1, 2)))
    check_cases(cases, guard=True)


def test_sums_fit_the_registers_of_a_thread():
    for count in (2, 3, 4):
        (kernel,) = executable(products(512, 512, 512, count=count, epilogue=ungated)).plan.kernels
        for s in contraction_simt_schedule.schedules(kernel.group.lowered.spec):
            assert s.thread_rows * s.thread_cols * count <= 64


# ---- tensor cores


def test_mma():
    cases = [
        products(136, 72, 40, "bfloat16", **form("mma")),
        products(70, 33, 24, "float16", along=True, count=3, epilogue=everything, **form("mma")),
        products(64, 64, 520, "int8", epilogue=ungated, **form("mma", lambda s: s.split_k > 1)),
    ]
    made = check_cases(cases, guard=True)
    assert all("mma<" in kernel.source.code for exe in made for kernel in exe.plan.kernels)


@pytest.mark.slow
def test_mma_schedules():
    r, cases = random.Random(3), []
    types = [("bfloat16", None), ("float8_e4m3", None), ("bfloat16", "int8"), ("uint8", "int8"), ("float16", None)]
    for number in range(6):
        dtype, second = types[number % len(types)]
        kind = {"across": bool(number & 1), "along": bool(number & 2), "count": 2 + number % 3, "second": second}
        epilogue = ungated if dtype == "uint8" else everything
        m, n, k = (r.choice((64, 70, 129)), r.choice((33, 64, 140)), r.choice((72, 77, 300)))
        cases.append(products(m, n, k, dtype, epilogue=epilogue, **kind, **form("mma", any_of=r)))
    cases.append(convolutions((2, 16, 9, 8), (24, 16, 3, 3), "float16", padding=1, case=form("mma")))
    made = check_cases(cases, guard=True)
    assert all("mma<" in kernel.source.code for exe in made for kernel in exe.plan.kernels)


def test_wgmma():
    cases = [
        products(136, 72, 136, "bfloat16", **form("wgmma")),
        products(70, 40, 64, "float16", along=True, count=3, epilogue=everything, **form("wgmma")),
    ]
    made = check_cases(cases, guard=True)
    assert all("wgmma<" in kernel.source.code for exe in made for kernel in exe.plan.kernels)


@pytest.mark.slow
def test_wgmma_schedules():
    r, cases = random.Random(5), []
    for number in range(5):
        across, along = (bool(number & 1), bool(number & 2))
        kind = {"across": across, "along": along, "count": 2 + number % 3, "epilogue": everything}
        m, n, k = (r.choice((64, 200)), r.choice((33, 72, 280)) if along else r.choice((72, 280)), r.choice((72, 328)))
        m += -m % 8
        cases.append(products(m, n, k, "bfloat16", **kind, **form("wgmma", any_of=r, blocks=5)))
    deep = 64 * 16 + 24
    cases += [
        products(136, 128, deep, "bfloat16", **form("wgmma", lambda s: s.split_k == 3)),
        products(
            136, 128, deep, "float16", along=True, count=3, epilogue=ungated, **form("wgmma", lambda s: s.split_k == 2)
        ),
        products(72, 48, 144, "float8_e4m3", along=True, **form("wgmma")),
        products(72, 48, 144, "int8", along=True, epilogue=ungated, **form("wgmma")),
        products(64, 96, 64, "bfloat16", lead=(3,), along=True, **form("wgmma")),
        convolutions((2, 64, 9, 8), (72, 64, 3, 3), "bfloat16", padding=1, case=form("wgmma")),
        convolutions((2, 8, 14, 14), (64, 8, 3, 3), "bfloat16", case=form("wgmma", lambda s: not s.gather)),
        convolutions((2, 8, 14, 14), (64, 8, 5, 5), "float16", padding=2, case=form("wgmma", lambda s: s.gather)),
    ]
    made = check_cases(cases, guard=True)
    assert all("wgmma<" in kernel.source.code for exe in made for kernel in exe.plan.kernels)


# ---- which graphs are one kernel


def kernels(graph: fg.Graph) -> int:
    return len(plan(graph).kernels)


def reason(graph: fg.Graph, producer: str, consumer: str) -> str:
    decisions = plan(graph).partition.decisions
    return next(d.reason for d in decisions if (d.producer, d.consumer) == (producer, consumer))


def test_three_products_meet_one_by_one():
    graph = fg.Graph("three")
    x = graph.tensor("x", (40, 24))
    a, b, c = (x @ graph.tensor(name, (24, 32)) for name in "abc")
    graph.output(graph.relu(a * b) + c, name="y")
    assert kernels(graph) == 1


def test_products_that_do_not_meet_stay_apart():
    graph = fg.Graph("qkv")
    x = graph.tensor("x", (40, 24))
    for name in "qkv":
        graph.output(graph.relu(x @ graph.tensor(f"w{name}", (24, 32))), name=name)
    assert kernels(graph) == 3


def test_products_that_differ_are_declined():
    for what, second in (("layout", {"strides": (1, 24)}), ("dtype", {"dtype": "float16"})):
        graph = fg.Graph("different")
        x = graph.tensor("x", (40, 24), "bfloat16")
        gate = graph.matmul(x, graph.tensor("a", (24, 32), "bfloat16"), dtype="float32", name="gate")
        up = graph.matmul(x, graph.tensor("b", (24, 32), **{"dtype": "bfloat16", **second}), dtype="float32", name="up")
        graph.output(gate * up, name="y")
        assert kernels(graph) == 2, what
        reasons = {reason(graph, "gate", "y"), reason(graph, "up", "y")}
        assert any("share 'x', but 'a' [24, 32] and 'b' [24, 32] differ in shape, strides, dtype" in r for r in reasons)


def test_products_of_different_tensors_are_declined():
    graph = fg.Graph("different")
    w = graph.tensor("w", (24, 32))
    graph.output(graph.tensor("a", (40, 24)) @ w * (graph.tensor("b", (40, 24)) @ w), name="y")
    assert kernels(graph) == 2


def test_a_product_of_another_is_declined():
    graph = fg.Graph("chain")
    x = graph.tensor("x", (32, 32))
    first = graph.matmul(x, graph.tensor("w", (32, 32)), name="first")
    graph.output(graph.matmul(x, first, name="second") + first, name="y")
    assert kernels(graph) == 2


def test_more_products_than_a_kernel_takes():
    graph = fg.Graph("five")
    x = graph.tensor("x", (40, 24))
    total = x @ graph.tensor("w0", (24, 32))
    for number in range(1, 5):
        total = graph.max(total, x @ graph.tensor(f"w{number}", (24, 32)))
    graph.output(total, name="y")
    assert kernels(graph) == 2
    reasons = [d.reason for d in plan(graph).partition.decisions if not d.fused]
    assert any("5 products of 'x': one kernel makes at most 4" in text for text in reasons)


def test_direct_convolutions_stay_apart():
    graph = fg.Graph("depthwise")
    x = graph.tensor("x", (1, 16, 9, 9))
    gate, up = (graph.conv_fprop(x, graph.tensor(n, (16, 1, 3, 3)), padding=1) for n in ("gate", "up"))
    graph.output(gate * up, name="y")
    assert kernels(graph) == 2
    assert any("two direct convolutions" in d.reason for d in plan(graph).partition.decisions)


# ---- sources


def large(count: int, dtype: str = "bfloat16", **kind: Any) -> ContractionSpec:
    case = products(4096, 14336, 4096, dtype, count=count, epilogue=ungated if count > 2 else swiglu, **kind)
    (kernel,) = executable(replace(case, arch="sm_90a")).plan.kernels
    return replace(kernel.group.lowered.spec, name=kernel.name)


def test_golden_source():
    (kernel,) = executable(replace(products(4096, 14336, 4096, "bfloat16"), arch="sm_90a")).plan.kernels
    check_golden("swiglu_hopper", kernel.source.code)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_spills(arch):
    module = contraction_wgmma_schedule if arch == "sm_90a" else contraction_mma_schedule
    sources = []
    for number, spec in enumerate((large(2), large(2, along=True), large(3), large(4, "float16"))):
        for n, s in enumerate(module.schedules(spec, target(arch))[:1]):
            sources.append(render(replace(spec, name=f"case{number}_{n}_kernel"), s))
    for count, dtype in ((2, "float32"), (4, "float32"), (3, "float64"), (3, "int64")):
        spec = large(count, dtype)
        for n, s in enumerate(contraction_simt_schedule.schedules(spec)[:1]):
            sources.append(render(replace(spec, name=f"simt_{dtype}_{count}_{n}_kernel"), s))
    for compiled in nvrtc.compile_kernels(sources, arch, jobs=2):
        assert compiled.spill_bytes == 0, compiled
        assert not re.search(r"C75\d\d", compiled.log), compiled.log
