"""Data movement in plans: views, memory, decisions, and the sources of kernels."""

from __future__ import annotations

import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, compile_for, share
from test_movement import ALL, CASES, fused, moved, odd, views, wide

import fusegraph as fg
from codegen.declined import Declined
from codegen.pointwise.tiling import TilesSchedule
from fusegraph.lowering import coordinates, movement
from fusegraph.lowering import cudnn as cudnn_lowering
from fusegraph.lowering.base import GroupView, Options
from fusegraph.ops import TABLE, Kind
from fusegraph.plan import plan
from fusegraph.report import eager
from fusegraph.report.compare import compare_engines
from fusegraph.report.explain import describe, explain_text

# ---- plans


def test_explain_shows_views() -> None:
    graph, _ = views()["attention heads"]
    facts = describe(plan(graph))
    assert [v["op"] for v in facts["views"]] == ["slice", "reshape", "reshape", "transpose"] * 2
    text = explain_text(facts)
    assert "read or written in place, without a kernel:" in text
    assert "needs no kernel: its elements are read, or written, where they lie" in " ".join(text.split())
    assert facts["bytes_moved"] == sum(t["bytes"] for k in facts["kernels"] for t in (*k["reads"], *k["writes"]))


def test_memory_lives_as_long_as_its_views() -> None:
    g = fg.Graph("views")
    x = g.tensor("x", (8, 8))
    first = g.softmax(x)
    view = first.T[1:]
    second = g.softmax(first @ g.tensor("w", (8, 8)))
    third = g.softmax(second @ g.tensor("v", (8, 8)))
    g.output(view @ third, name="y")
    check_all([g])
    made = plan(g)
    at = {t.name: (offset, offset + t.nbytes) for t, offset in made.memory.offsets.items()}
    base = next(t.base for k in made.kernels for t in k.group.reads if t.base is not t)
    low, high = at[base.name]
    assert all(b <= low or a >= high for name, (a, b) in at.items() if name != base.name)


@pytest.mark.slow
def test_long_chains() -> None:
    """Elements are followed back through a bounded number of nodes."""
    g = fg.Graph("chain")
    y = g.tensor("x", (64, 64))
    for _ in range(100):
        y = g.flip(y + 1.0, 0).T
    g.output(y, name="y")
    made = plan(g)
    assert 300 / movement.MOST_NODES <= len(made.kernels) <= 10
    check_all([g])


def test_decisions_name_what_moves() -> None:
    g = fg.Graph("reasons")
    x = g.tensor("x", (8, 6))
    g.output(g.softmax(g.pad(x, 1)), name="y")
    decision = next(d for d in plan(g).partition.decisions if not d.fused)
    assert decision.reason.startswith("pad 'pad' and reduction")


def test_cudnn_refuses_movement_with_a_reason() -> None:
    g = fg.Graph("cudnn")
    x = g.tensor("x", (8, 6))
    for build, text in ((lambda: x.T, "no plans for a transpose"), (lambda: g.pad(x, 1), "has no pad")):
        y = build()
        node = g.producer(y)
        assert node is not None
        with pytest.raises(Declined, match=text):
            cudnn_lowering.accept(GroupView(g, [node], {node: 0}), Options())


def test_torch_moves_alike() -> None:
    pytest.importorskip("torch")
    assert set(eager.movement(eager.load_torch())) == {op.name for op in TABLE.values() if op.kind is Kind.MOVEMENT}
    g = fg.Graph("torch")
    x, i = g.tensor("x", (5, 6, 7)), g.tensor("i", (2, 2), "int32")
    for name, (build, _) in CASES.items():
        if name != "nothing":
            g.output(build(g, x), name=name)
    g.output(g.gather(x, i, axis=1), name="gathered")
    result = compare_engines(g, ["torch", "reference"])
    assert [e.status for e in result.engines] == ["ran", "ran"], result.engines[0].reason
    assert result.ok, result.engines[0].outputs


# ---- kernels


def golden_graphs() -> dict[str, fg.Graph]:
    rotated = fg.Graph("rotary", io_dtype="bfloat16")
    x, cos, sin = (rotated.tensor(n, s) for n, s in (("x", (4, 512, 128)), ("cos", (512, 128)), ("sin", (512, 128))))
    low, high = rotated.split(x, 2, axis=2)
    rotated.output(x * cos + rotated.concatenate(-high, low, axis=2) * sin, name="y")
    gate = fg.Graph("gated", io_dtype="bfloat16")
    first, second = gate.split(gate.tensor("h", (512, 2048)), 2, axis=1)
    gate.output(gate.swish(first) * second, name="y")
    padded = fg.Graph("padded")
    padded.output(padded.pad(padded.relu(padded.tensor("x", (64, 30, 30))), [0, 1, 1]), name="y")
    looked = fg.Graph("embedding", io_dtype="float16")
    tokens = looked.tensor("tokens", (16, 128), "int32")
    looked.output(looked.gather(looked.tensor("table", (32000, 512)), tokens) * 22.625, name="y")
    shuffled = fg.Graph("pixel_shuffle")
    shuffled.output(shuffled.depth_to_space(shuffled.relu(shuffled.tensor("x", (8, 64, 32, 32))), 2), name="y")
    return {g.name: g for g in (rotated, gate, padded, looked, shuffled)}


@pytest.mark.parametrize("name", list(golden_graphs()))
def test_golden_source(name: str) -> None:
    (kernel,) = plan(golden_graphs()[name]).kernels
    check_golden(name, kernel.source.code)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_compile(arch: str) -> None:
    every = compile_for(arch, share(arch, [*golden_graphs().values(), *fused()]))
    assert [k.name for k in every if k.spill_bytes or k.stack_bytes] == []


def test_a_turned_result_goes_through_tiles() -> None:
    g = fg.Graph("turned", io_dtype="bfloat16")
    g.output(g.tensor("x", (512, 256)).T, name="y")
    (kernel,) = plan(g).kernels
    assert isinstance(kernel.choice.schedule, TilesSchedule)


@pytest.mark.slow
def test_far_elements_have_wide_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    g = fg.Graph("far")
    g.output(g.pad(g.tensor("x", (2**16, 2**16)), 1), name="y")
    (kernel,) = plan(g).kernels
    assert "int64(" in kernel.source.code
    assert "int32(" not in kernel.source.code
    monkeypatch.setattr(coordinates, "FAR", 1)
    check_all(fused())


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    graphs = [g for g, _ in views().values()] + fused() + odd() + [g for d in ALL for g in (*moved(d), *wide(d))]
    check_on_gpu([*graphs, *golden_graphs().values()])


def test_concatenations_of_very_many_are_planned_soon() -> None:
    """As loops leave them that are written once an iteration: no kernel of all is looked at in vain."""
    graph = fg.Graph("test")
    x = graph.tensor("x", (3, 4))
    graph.output(graph.concatenate([graph.relu(x * float(n)) for n in range(250)], axis=0), name="y")
    tried = []
    original = movement._program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(movement, "_program", lambda *given: tried.append(1) or original(*given))
        plan(graph)
    assert len(tried) < 10
