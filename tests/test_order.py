"""Kernels that begin at the end of memory, where what the kernel before had last is still in the cache; and those that
begin before the kernel before has ended.
"""

from __future__ import annotations

import re

import pytest
from graphs import check_all

import fusegraph as fg
from codegen.target import PORTABLE, target
from fusegraph.lowering import parallelism
from fusegraph.lowering.base import Options
from fusegraph.passes import order, split_reductions
from fusegraph.plan import by_cost_model, plan
from fusegraph.runtime import nvrtc


def batchnorm_relu(shape: tuple[int, ...], dtype: str = "bfloat16") -> fg.Graph:
    """Builds batch norm and relu: partial statistics, their combination, then a second pass over the tensor."""
    g = fg.Graph("batchnorm_relu", io_dtype=dtype)
    x = g.tensor("x", shape, layout="NHWC")
    scale, bias = (g.tensor(name, (1, shape[1], 1, 1)) for name in ("scale", "bias"))
    g.output(g.relu(g.batchnorm(x, scale, bias)[0]), name="y")
    return g


def turned(graph: fg.Graph) -> list[bool]:
    return ["block_from_the_end()" in k.source.code for k in plan(graph).kernels]


def test_what_is_read_again_is_read_from_the_end() -> None:
    """What is between, small as it is, leaves the cache as it was."""
    assert turned(batchnorm_relu((64, 256, 56, 56))) == [False, False, True]
    assert turned(batchnorm_relu((16, 32, 112, 112))) == [False, False, False]  # all of it stays in the cache


def test_there_and_back() -> None:
    """The third kernel begins where the second one ended: at the beginning."""
    g = fg.Graph("chain")
    x = g.tensor("x", (4096, 4096))
    y = g.output(g.relu(x), name="y")
    z = g.output(g.cumsum(g.transpose(y) + 1.0, 1), name="z")
    g.output(g.transpose(g.exp(z)), name="w")
    kinds = [k.group.family for k in plan(g).kernels]
    assert set(kinds) - order.FAMILIES
    found = turned(g)
    assert not any(f for f, kind in zip(found, kinds) if kind not in order.FAMILIES)
    g = fg.Graph("columns")
    x = g.tensor("x", (4096, 8192))
    for axis in (1, 0):
        x = x - g.reduction(g.exp(x), "add", axis)
        x = g.output(x, name=f"x{axis}")
    g.output(x / g.reduction(x, "max", 1), name="y")
    assert turned(g) == [False, True, False]


def test_what_the_next_kernel_begins_with_stays_in_the_cache() -> None:
    """The last of what is read is kept instead only where nobody begins with the last of what is written."""

    def evict_last(graph: fg.Graph) -> list[bool]:
        kernels = plan(graph, choose=by_cost_model(target("sm_90a"))).kernels
        return ["evict_last" in k.source.code for k in kernels]

    g = fg.Graph("columns")
    x = g.tensor("x", (8192, 8192))
    for axis in (1, 0):
        x = x - g.reduction(g.exp(x), "add", axis)
        x = g.output(x, name=f"x{axis}")
    g.output(x / g.reduction(x, "max", 1), name="y")
    first, *_, last = evict_last(g)
    assert not first
    assert last
    g = fg.Graph("alone")
    g.output(g.softmax(g.tensor("x", (8192, 4096))), name="y")
    assert evict_last(g) == [True]


def test_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "LARGE", 0)
    monkeypatch.setattr(order, "FEW", 2000 / PORTABLE.l2_bytes)
    for module, name, value in (
        (split_reductions, "SHORT_BYTES", 512),
        (split_reductions, "LEAST_PART_BYTES", 256),
        (split_reductions, "BUSY", 1 << 20),
        (parallelism, "LONG_BYTES", 512),
        (parallelism, "BLOCK_RATE", 1e-3),
    ):
        monkeypatch.setattr(module, name, value)
    g = fg.Graph("columns")
    x = g.tensor("x", (37, 130))
    for axis in (1, 0, 1):
        x = x - g.reduction(g.exp(x), "avg", axis)
        x = g.output(x, name=f"x{axis} {len(g.outputs)}")
    graphs = [g, batchnorm_relu((2, 8, 5, 7), "float32")]
    kinds = {k.group.family for g in graphs for k, t in zip(plan(g).kernels, turned(g)) if t}
    assert kinds | {"members"} == order.FAMILIES
    check_all(graphs)


def overlaps(graph: fg.Graph) -> list[list[str]]:
    """Returns which grid dependency calls each kernel begins with."""
    made = []
    for kernel in plan(graph).kernels:
        body = [line.strip() for line in kernel.source.code.partition("\n{\n")[2].splitlines()]
        made.append([line.removeprefix("grid_dependency_").removesuffix("();") for line in body if "grid_dep" in line])
        assert all("grid_dependency" in line for line in body[: len(made[-1])])
        assert kernel.source.dependent == ("wait" in made[-1])
    return made


def test_launches_overlap() -> None:
    """A kernel waits for the one before where it begins, not where that is launched."""
    assert overlaps(batchnorm_relu((64, 256, 56, 56))) == [["launch"], ["wait", "launch"], ["wait"]]
    assert overlaps(batchnorm_relu((1, 256, 1, 1))) == [[]]
    for size, first in ((128, []), (64, ["launch"])):  # blocks that compute are spread evenly, others wait for memory
        g = fg.Graph("products")
        x, v, w = g.tensor("x", (size, 128)), g.tensor("v", (128, 128)), g.tensor("w", (128, 32768))
        g.output(g.softmax(g.matmul(g.relu(g.matmul(x, v)), w)), name="y")
        assert overlaps(g) == [first, ["wait", "launch"], ["wait"]]


def layers(size: int, attention: bool) -> fg.Graph:
    """Returns three products, perhaps with an attention behind them."""
    g = fg.Graph("layers", "bfloat16")
    x = g.relu(g.tensor("x", (1, 1, size, 512)) + 1.0)
    for n in range(3):
        x = x @ g.tensor(f"w{n}", (1, 1, 512, 512), strides=(512 * 512, 512 * 512, 1, 512))
    if attention:
        k, v = (g.tensor(name, (1, 8, 512, 64)) for name in "kv")
        x = g.sdpa(x.reshape(1, size, 8, 64).transpose(0, 2, 1, 3), k, v)
    g.output(g.relu(x), name="y")
    return g


@pytest.mark.parametrize(("size", "attention"), [(32, False), (512, False), (8, True), (512, True)])
def test_hopper_kernels_ask_for_operands_between_wait_and_launch(size: int, attention: bool) -> None:
    """A kernel reads nothing before it waits, but asks the L2 cache for an operand whose rows are read once.

    The next one comes in when this one has asked for all of its operands.
    """
    loads = re.compile(r"\b(?:tma_load\w*|copy_async|load_packed|load)(?:<[^;]*?>)?\(")
    seen = set()
    for kernel in plan(layers(size, attention), Options(target=target("h200"))).kernels:
        name, code = type(kernel.choice.schedule).__name__, kernel.source.code.partition("\n{\n")[2]
        before, _, after = code.partition("grid_dependency_wait();")
        if "Wgmma" not in name or not after:
            continue
        assert not loads.search(before)
        assert ("tma_prefetch_box" in before) == (size <= 64 and name == "WgmmaSchedule")
        launched = after.partition("grid_dependency_launch();")
        if launched[1]:
            assert "tma_load" not in launched[2]
            seen.add(name)
    assert seen <= {"WgmmaSchedule", "AttentionWgmmaSchedule"}
    assert seen or size < 64


def test_what_others_write_is_not_promised_to_stay() -> None:
    """The compiler reads what is const and __restrict__ by instructions that it moves to before the wait; a function of
    the device library is not to promise for its caller, nor to name such an instruction.
    """
    promise = re.compile(r"\bconst \w+\* ?__restrict__")
    found = set()
    for graph in (batchnorm_relu((64, 256, 56, 56)), winograd()):
        for kernel in plan(graph).kernels:
            found.add((kernel.source.dependent, bool(promise.search(kernel.source.code))))
    assert found == {(False, True), (True, False)}
    for header in nvrtc.HEADER_FOLDER.glob("*.cuh"):
        code = re.sub(r"//.*", "", header.read_text())
        assert not promise.search(code), header.name
        assert not re.search(r"__ldg|global\.nc", code), header.name


def winograd() -> fg.Graph:
    """Returns a convolution that takes four kernels."""
    g = fg.Graph("winograd")
    x, w = g.tensor("x", (8, 64, 28, 28), layout="NHWC"), g.tensor("w", (64, 64, 3, 3), layout="KRSC")
    g.output(g.relu(g.conv_fprop(x, w, padding=1)), name="y")
    return g
