"""Thin products that read their weights before the kernels in front of them end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from graphs import check_on_gpu, leave_out_pass
from kernel_cases import Case, check_cases
from test_contraction_thin import KINDS, first, spec_of, thin, weights

import codegen
import fusegraph as fg
from codegen.contraction.thin_schedule import ThinSchedule, behind
from codegen.kernel import in_sequence
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan, plan


@pytest.fixture(autouse=True)
def as_given(monkeypatch: pytest.MonkeyPatch, contractions_in_one_piece: None) -> None:
    """Turns off copies of operands, which would give the cases another form."""
    leave_out_pass(monkeypatch, "operand layouts")


def ring(tile: int, warps: int, pieces: int) -> Any:
    return lambda _: ThinSchedule(tile, warps, pieces, ring=True)


@pytest.mark.slow
def test_every_schedule():
    cases = []
    every = itertools.product((16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8))
    for number, (tile, warps, pieces) in enumerate(each for each in every if each[0] * each[1] * each[2] <= 2048):
        few, size, depth = (1, 3, 8, 9, 16)[number % 5], tile + number % 3 * 7, (256, 264, 1000, 72)[number % 4]
        cases.append(thin(few, size, depth, "bfloat16", swapped=number % 2 == 1, schedule=ring(tile, warps, pieces)))
    check_cases(cases, guard=True)


@pytest.mark.slow
def test_types_and_several_products():
    cases = [thin(3, 33, 528, dtype, schedule=ring(16, 2, 4)) for dtype in ("float16", "float8_e4m3", "int8")]
    for few in (1, 11):
        graph = fg.Graph(f"gated {few}", io_dtype="bfloat16")
        x = graph.tensor("x", (few, 264))
        gate, up = (graph.tensor(name, (264, 40), strides=(1, 264)) for name in ("gate", "up"))
        graph.output(graph.swish(graph.matmul(x, gate)) * graph.matmul(x, up), name="y")
        cases.append(Case(graph, schedule=ring(16, 4, 2)))
    for exe in check_cases(cases, guard=True):
        (kernel,) = exe.plan.kernels
        assert "copy_async<16>" in kernel.source.code


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_few_bits_come_to_registers(kind):
    spec = spec_of(weights(kind, 1, 64, 4096))
    assert behind(spec, first(spec)) is None


def layers(count: int, dtype: str = "bfloat16", *, width: int = 2048) -> fg.Graph:
    """Returns layers of a perceptron for one row, whose weights are parameters."""
    graph = fg.Graph("layers", io_dtype=dtype)
    x = graph.tensor("x", (1, width))
    for number in range(count):
        w = graph.tensor(f"w{number}", (width, width), strides=(1, width), parameter=True)
        x = graph.tanh(graph.matmul(x, w))
    graph.output(x, name="y")
    return graph


def rings(made: Plan) -> list[bool]:
    return [kernel.choice.schedule.ring for kernel in made.kernels]


def test_weights_are_read_before_earlier_kernels_end():
    made = plan(layers(3), Options(target=target("h200")))
    assert rings(made) == [False, True, True]
    for kernel in made.kernels[1:]:
        code = kernel.source.code
        before, _, after = code.partition("grid_dependency_wait();")
        assert before.count("copy_async_commit();") == 1
        assert "load" not in before.partition("{\n")[2]
        assert "fetch_thin" in after
        assert kernel.source.dependent
    assert rings(plan(layers(3), Options(target=target("a100")))) == [False] * 3, "its launches do not overlap"


def test_what_others_write_is_read_when_they_have_ended():
    def made(assigned: bool, computed: bool) -> list[bool]:
        graph = fg.Graph("two", io_dtype="bfloat16")
        x, first = graph.tensor("x", (1, 2048)), graph.tensor("first", (2048, 2048), strides=(1, 2048))
        w, more = graph.tensor("w", (2048, 2048)), graph.tensor("more", (2048, 2048))
        if assigned:
            w = graph.assign(w, more + 1)
        if computed:
            w = graph.cumsum(w, axis=1)
        graph.output(graph.matmul(graph.tanh(graph.matmul(x, first)), graph.transpose(w)), name="y")
        kernels = plan(graph, Options(target=target("h200"))).kernels
        return [k.choice.schedule.ring for k in kernels if isinstance(k.choice.schedule, ThinSchedule)]

    assert sum(made(False, False)) == 1
    assert not any(made(True, False)[-1:])
    assert not any(made(False, True)[-1:])


def test_without_knowledge_the_kernel_waits_first():
    spec = spec_of(thin(1, 2048, 2048, "bfloat16").graph)
    schedule, numbers = behind(spec, first(spec))
    assert list(numbers) == [1]
    source = codegen.render(spec, schedule)
    for known in (False, True):
        code = in_sequence(source, first=False, early=False, known=known).code
        assert (code.index("fetch_large(c, ") < code.index("grid_dependency_wait();")) == known


@pytest.mark.gpu
def test_on_a_gpu():
    check_on_gpu([layers(6), layers(24), layers(6, "float16", width=4096)])
