"""What planning does once for layers that are alike, and what it leaves out: counts of calls, not seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import codegen
from codegen import best_schedule, family
from codegen.contraction import mma_schedule, wgmma_schedule
from codegen.contraction.wgmma_layout import ResultSpace
from codegen.direct_convolution import slide_schedule
from fusegraph import Graph
from fusegraph.engines.plans import _dumped
from fusegraph.lowering import prologue
from fusegraph.lowering.base import Options
from fusegraph.passes import estimates
from fusegraph.plan import Plan, plan, shared_kernels

HOPPER = codegen.target("sm_90a")


def planned(g: Graph) -> Plan:
    return plan(g, Options(target=HOPPER))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls by name, nothing being known of what was planned before."""
    found: Counter[str] = Counter()

    def count(where: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(where, name)

        def counting(*args: Any) -> Any:
            found[name] += 1
            return function(*args)

        monkeypatch.setattr(where, name, counting)

    forget()
    monkeypatch.setattr(estimates, "_KNOWN", {})
    for where, name in (
        (wgmma_schedule, "_staged"),
        (wgmma_schedule, "Layout"),
        (ResultSpace, "_side"),
        (mma_schedule, "_tile"),
        (mma_schedule, "_cost"),
        (slide_schedule, "columns"),
        (slide_schedule, "_work"),
    ):
        count(where, name)
    return found


def forget() -> None:
    """Forgets what is known of the schedules of products."""
    for module in (family, mma_schedule, wgmma_schedule):
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def network(layers: int) -> Graph:
    """Returns layers of two products, a gelu and a norm."""
    g = Graph("network", io_dtype="bfloat16")
    x = g.tensor("x", (1024, 320))
    for n in range(layers):
        up, down = g.tensor(f"up{n}", (320, 1280), parameter=True), g.tensor(f"down{n}", (1280, 320), parameter=True)
        x = g.rmsnorm(x + g.gelu(x @ up) @ down, g.tensor(f"scale{n}", (1, 320), parameter=True))
    g.output(x, name="y")
    return g


def test_layers_that_are_alike_are_estimated_once(calls):
    few = {k.source.code for k in planned(network(3)).every_kernel}
    assert calls.keys() >= {"_staged", "_tile", "_cost"}
    calls.clear()
    more = planned(network(9)).every_kernel
    assert len({k.source.code for k in more}) == len(few) < len(more)
    assert not calls.keys() & {"_staged", "_tile", "_cost"}


def test_schedules_share_what_does_not_depend_on_them(calls):
    g = Graph("product", io_dtype="bfloat16")
    a, b, c = g.tensor("a", (4096, 2048)), g.tensor("b", (2048, 4096)), g.tensor("c", (4096, 4096))
    g.output(g.relu(a @ b + c), name="y")
    (kernel,) = planned(g).kernels
    calls.clear()
    forget()
    for ranked in (mma_schedule._ranked, wgmma_schedule._ranked):
        ranked(kernel.group.lowered.spec, HOPPER)
    assert calls["_side"] == 2 < calls["Layout"]  # one for c and one for y
    assert calls["_tile"] <= 2 * len(mma_schedule.TILES) < calls["_cost"]


@pytest.mark.parametrize("shape", [(4096, 2048, 4096), (512, 1024, 96), (64, 8192, 192), (8200, 72, 520)])
@pytest.mark.parametrize("form", [wgmma_schedule, mma_schedule])
def test_what_cannot_be_the_best_is_not_estimated(calls, form, shape):
    m, k, n = shape
    g = Graph("product", io_dtype="bfloat16")
    g.output(g.relu(g.tensor("a", (m, k)) @ g.tensor("b", (k, n)) + g.tensor("c", (m, n))), name="y")
    spec = planned(g).kernels[0].group.lowered.spec
    some, every = [], []
    for asked, counts in ((form.best, some), (form._ranked, every)):
        forget()
        calls.clear()
        counts += [asked(spec, HOPPER), calls["_staged"] + calls["_cost"]]
    assert some[0] == every[0][0][1] == form.schedules(spec, HOPPER)[0]
    assert some[1] < every[1]


def test_slides_share_what_does_not_depend_on_them(calls):
    g = Graph("depthwise", io_dtype="bfloat16")
    x = g.tensor("x", (8, 96, 56, 56), layout="NHWC")
    g.output(g.conv_fprop(x, g.tensor("w", (96, 1, 3, 3)), padding=1, groups=96), name="y", layout="NHWC")
    best_schedule(planned(g).kernels[-1].group.lowered.spec, HOPPER)
    assert 0 < 4 * calls["columns"] < calls["_work"]


def test_what_is_computed_in_registers_is_not_estimated_apart(monkeypatch):
    asked = []
    monkeypatch.setattr(prologue, "FAMILY", SimpleNamespace(cycles=lambda spec, _: asked.append(spec) or 1.0))
    g = Graph("computed", io_dtype="bfloat16")
    a, b = g.tensor("a", (4096, 4096)), g.tensor("b", (4096, 4096))
    g.output(g.relu(a) @ b, name="y")
    (kernel,) = planned(g).kernels
    assert kernel.choice.schedule.computes
    assert not asked


def test_a_network_is_made_when_it_is_asked_for():
    g = network(2)
    assert list(g.network.nodes) == g.nodes
    g.output(g.relu(g.outputs[0]), name="z")
    assert list(g.network.nodes) == g.nodes  # also after a change
    entry = _dumped(planned(g), g)
    assert b"networkx" not in (entry or b"networkx")


def test_graphs_that_are_planned_together_share_kernels() -> None:
    def layer(name: str, width: int) -> Graph:
        g = Graph(name)
        x, w = g.tensor("x", (64, 256), "float16"), g.tensor(f"w_of_{name}", (256, width), "float16")
        g.output(g.softmax(g.gelu(g.matmul(x, w)), axis=1))
        return g

    def sources(count: int) -> list[list[Any]]:
        plans = [planned(layer(f"layer_{n}", 256)) for n in range(count)] + [planned(layer("layer_0", 512))]
        return [[kernel.source for kernel in p.kernels] for p in plans]

    with shared_kernels():
        first, *alike, other = sources(3)
    assert len(first) > 1
    assert all(a is b for each in alike for a, b in zip(first, each, strict=True))
    assert len({source.name for source in (*first, *other)}) == len(first) + len(other), "names are unique"
    apart = [source for each in sources(3) for source in each]
    assert len({source.code for source in apart}) == len(apart)
