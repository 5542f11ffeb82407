"""Which pointwise nodes become a contraction's prologue, and why others do not."""

from __future__ import annotations

import re

import pytest
from kernel_cases import Case, check_cases, executable
from test_prologue import Prologue, affine, dequantised, product

import fusegraph as fg
from codegen import target
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.declined import Declined
from fusegraph.passes.partition import Decision
from fusegraph.plan import plan

pytestmark = pytest.mark.usefixtures("contractions_in_one_piece")


def decision(graph: fg.Graph, consumer: str) -> Decision:
    return next(d for d in plan(graph).partition.decisions if d.consumer == consumer)


def test_a_prologue_is_fused_last():
    """After what follows a contraction, and after the pointwise nodes among themselves."""
    graph = fg.Graph("chain", io_dtype="bfloat16")
    x = graph.tensor("x", (2, 64, 9, 9), layout="NHWC")
    w = [graph.tensor(f"w{n}", (64, 64, 3, 3), layout="NHWC") for n in range(2)]
    y = graph.conv_fprop(graph.relu(x, name="first"), w[0], padding=1, name="conv")
    graph.output(graph.conv_fprop(graph.relu(y, name="second"), w[1], padding=1), name="y")
    groups = [[n.name for n in g.nodes] for g in plan(graph).partition.groups]
    assert groups == [["first", "conv", "second"], ["y"]]


def test_what_others_need_stays_outside():
    graph = fg.Graph("shared", io_dtype="bfloat16")
    h = graph.relu(graph.tensor("x", (64, 64)), name="h")
    graph.output(h @ graph.tensor("w", (64, 64)), name="y")
    graph.output(h @ graph.tensor("v", (64, 64)), name="z")
    assert len(plan(graph).kernels) == 3
    graph = fg.Graph("twice", io_dtype="bfloat16")
    h = graph.relu(graph.tensor("x", (64, 64)), name="h")
    graph.output(h @ h + h, name="y")  # both operands and the program: evaluated in three places, in one kernel
    check_cases([Case(graph)])
    assert len(plan(graph).kernels) == 1


def test_recomputation_that_costs_more_than_it_saves_is_declined():
    def activated(n: int, op: str = "gelu", prologue: Prologue | None = None) -> fg.Graph:
        graph = fg.Graph("wide", io_dtype="bfloat16")
        a = graph.tensor("a", (4096, 4096))
        prologue = prologue or (lambda g, x: getattr(g, op)(x, name="activated"))
        graph.output(prologue(graph, a) @ graph.tensor("b", (4096, n)), name="y")
        return graph

    assert decision(activated(256), "y").fused
    assert decision(activated(4096, "relu"), "y").fused  # comes with the rounding of what tensor cores multiply
    assert decision(activated(1024, prologue=affine(-1)), "y").fused
    assert not decision(activated(4096, prologue=affine(-1)), "y").fused
    declined = decision(activated(4096), "y")
    assert not declined.fused
    assert re.fullmatch(
        r"in front of matmul 'y' every element of 'activated' would be computed 16 times in about 13 instructions, "
        r"which takes as long as moving \d+ MB, to save moving 75 MB",
        declined.reason,
    )
    # An integer weight that is converted costs little beside the tensor cores, a tensor that lies otherwise much.
    graph = fg.Graph("weights", io_dtype="bfloat16")
    w = graph.tensor("w", (4096, 4096), "int8", strides=(1, 4096))
    graph.output(graph.tensor("x", (4096, 4096)) @ dequantised(-1, "bfloat16")(graph, w), name="y")
    assert decision(graph, "y").fused
    # A float32 operand is also divided into parts for tensor cores.
    graph = fg.Graph("exact")
    scaled = graph.relu(graph.tensor("a", (4096, 4096)) * 2.0 + 1.0, name="scaled")
    graph.output(scaled @ graph.tensor("b", (4096, 4096)), name="y")
    assert "computed 16 times in about 8 instructions" in decision(graph, "y").reason


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda g, x: g.softmax(x), "and is not pointwise|is not pointwise"),
        (lambda g, x: x + sum((g.tensor(f"r{n}", x.shape) for n in range(3)), x), "the limits are 8 and 3"),
    ],
    ids=["softmax", "many tensors"],
)
def test_refusals_say_why(build, reason):
    graph = fg.Graph("refused", io_dtype="bfloat16")
    graph.output(build(graph, graph.tensor("x", (64, 64))) @ graph.tensor("w", (64, 64)), name="y")
    declined = [d for d in plan(graph).partition.decisions if d.consumer == "y"]
    assert len(plan(graph).kernels) == 2
    assert any(re.search(reason, d.reason) for d in declined), declined


def test_operands_of_fewer_dimensions():
    graph = fg.Graph("short", io_dtype="bfloat16")
    row = graph.tensor("row", (16,)) * graph.tensor("one", (1, 1))
    graph.output(row @ graph.relu(graph.tensor("w", (16, 8))), name="y")
    check_cases([Case(graph)])
    assert len(plan(graph).kernels) == 1


def test_direct_convolutions_read_their_input_as_it_lies():
    graph = fg.Graph("depthwise")
    x = graph.relu(graph.tensor("x", (1, 8, 20, 20)), name="activated")
    graph.output(graph.conv_fprop(x, graph.tensor("w", (8, 1, 3, 3)), groups=8), name="y")
    assert "so few channels that it is a direct convolution" in decision(graph, "y").reason


def test_hopper_declines_with_the_reason():
    made = executable(product(64, 64, 32, affine(-1), None, ("float32", "float32")))
    assert made.plan is not None
    with pytest.raises(Declined, match="tf32"):
        contraction_wgmma_schedule.schedules(made.plan.kernels[0].group.lowered.spec, target("sm_90a"))
