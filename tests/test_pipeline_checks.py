"""What is checked of the barriers, copies and products of a kernel before it is printed: each mistake is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_attention_backward import CAUSAL, made

import fusegraph as fg
from codegen.expr import Program
from codegen.kernel import Kernel
from codegen.pipeline import Meeting, Pipeline, Relay, await_products, products, results
from codegen.target import target
from codegen.trace import PipelineError, Trace
from fusegraph.lowering.base import Options
from fusegraph.plan import by_cost_model, plan

HOPPER = by_cost_model(target("sm_90a"))
#: What a call that writes something awaited or counted notes.
CALLS = ("acquire", "expect", "copy", "arrive", "wait", "release", "await", "meet")
#: More of the kernels of gradients, whose roles differ.
GRADIENTS: dict[str, tuple[dict[str, Any], Options]] = {
    "fused": ({"depth": 64, **CAUSAL}, Options()),
    "fused, two panels": ({"depth": 128}, Options()),
    "separate": ({"depth": 64, "soft_cap": 30.0, **CAUSAL}, Options()),
    "separate, without slope": ({"depth": 128}, Options(workspace=1000)),
}


class Tiny(Kernel):
    """A kernel of a ring of two stages, a producer, and two consumers that multiply."""

    def __init__(self) -> None:
        super().__init__("tiny")
        self.ring = Pipeline(self, "ring", 2, releases=2)

    def produce(self, expected: int = 64, copied: int = 64) -> None:
        with self.role("producer"), self.loop("for (;; ++stage)"):
            self.ring.acquire()
            self.ring.expect(expected)
            self.ring.copied(copied)

    def multiply(self, sums: str = "s") -> None:
        with products(self, sums, (self.ring, "stage"), registers="factor"):
            self.line(f"multiply({sums});")

    def consume(self, done: Callable[[], None], groups: int = 2) -> None:
        """Writes the wait for a stage, products, and then what is done."""
        with self.role("consumer", groups=groups), self.loop("for (;; ++stage)"):
            self.ring.wait()
            self.multiply()
            done()

    def made(self) -> str:
        return self.source(Program(), blocks=1, threads=256).code


@pytest.fixture
def k() -> Tiny:
    return Tiny()


def refused(k: Tiny, text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        k.made()


def done(k: Tiny) -> None:
    """Writes the wait for products, and the release of their stage."""
    results(k, "s", note="the products are there")
    k.ring.release()


def test_what_fits_is_written(k: Tiny) -> None:
    k.produce()
    k.consume(lambda: done(k))
    code = k.made()
    assert "barrier_wait(shared.ring_empty[stage.index], stage.parity ^ 1);" in code
    assert "wgmma_wait<0>();  // the products are there\n" in code
    assert "if (t == 0) barrier_arrive(shared.ring_empty[stage.index]);" in code


def test_waited_for_and_never_filled(k: Tiny) -> None:
    k.consume(lambda: done(k))
    refused(k, "pipeline 'ring' is waited for, and nothing fills it")


def test_filled_before_it_is_acquired(k: Tiny) -> None:
    with k.role("producer"):
        k.ring.expect(64)
        k.ring.acquire()
    refused(k, "a stage of pipeline 'ring' is filled before it is acquired")


def test_arrivals_of_fills(k: Tiny) -> None:
    with k.role("producer"):
        k.ring.acquire()
        k.ring.arrive(count=32)
    refused(k, "32 arrivals fill a stage of pipeline 'ring', which expects 1")


def test_arrivals_of_releases(k: Tiny) -> None:
    k.produce()
    k.consume(lambda: done(k), groups=3)
    refused(k, "3 arrivals release a stage of pipeline 'ring', which expects 2")


def test_bytes(k: Tiny) -> None:
    k.produce(copied=48)
    k.consume(lambda: done(k))
    refused(k, "64 bytes of a stage of pipeline 'ring' are expected, and 48 copied")


def test_waited_for_and_not_released(k: Tiny) -> None:
    k.produce()
    k.consume(lambda: await_products(k))
    refused(k, "the consumer waits for a stage of pipeline 'ring' and does not release it")


@pytest.mark.parametrize("left", ["in the loop", "behind it"])
def test_released_in_the_next_pass(k: Tiny, left: str) -> None:
    """Each pass releases the stage of the one before, and the last one is released behind the loop."""
    k.produce()
    with k.role("consumer", groups=2), k.loop("for (;;)"):
        k.moved("previous", "out of scope")
        with k.loop("for (int tile = first; tile < last; ++tile)"):
            k.ring.wait()
            if left != "in the loop":
                k.ring.release("previous", condition="t == 0 && tile > first")
            k.moved("stage", "previous")
        if left != "behind it":
            k.ring.release("previous")
    refused(k, "the consumer waits for a stage of pipeline 'ring' and does not release it")


def test_a_name_taken_from_a_stage_that_is_not_released(k: Tiny) -> None:
    k.produce()
    with k.role("consumer", groups=2):
        for _ in range(2):
            k.ring.wait()
            k.moved("stage", "previous")
        for _ in range(2):
            k.ring.release("previous")
    refused(k, "the consumer loses 'previous' of 'ring' and has not released it")


def test_released_and_not_waited_for(k: Tiny) -> None:
    k.produce()
    with k.role("consumer"):
        k.ring.release()
    refused(k, "the consumer releases stages of pipeline 'ring' without waiting for one")


def test_released_and_nobody_acquires(k: Tiny) -> None:
    with k.role("consumer"):
        k.ring.release()
    refused(k, "stages of pipeline 'ring' are released, and nobody waits for that")


def test_multiplied_before_it_is_there(k: Tiny) -> None:
    k.produce()
    with k.role("consumer"):
        k.multiply()
    refused(k, "the consumer multiplies 'stage' of 'ring' before it waits for it")


def test_read_before_the_products_are_done(k: Tiny) -> None:
    k.produce()

    def early() -> None:
        k.reads("s")
        done(k)

    k.consume(early)
    refused(k, "the consumer reads 's', which products are still added to")


def test_read_in_the_next_pass_before_the_products_are_done(k: Tiny) -> None:
    k.produce()
    with k.role("consumer"), k.loop("for (;;)"):
        k.ring.wait()
        k.reads("o")
        k.multiply("o")
        await_products(k, 1)
        k.ring.release("before")
        k.moved("stage", "before")
    refused(k, "the consumer reads 'o', which products are still added to")


def test_released_while_products_read_it(k: Tiny) -> None:
    k.produce()

    def early() -> None:
        k.ring.release()
        await_products(k)

    k.consume(early)
    refused(k, "the consumer releases 'stage' of 'ring', which 's' still needs")


def test_released_by_another_name_while_products_read_it(k: Tiny) -> None:
    k.produce()

    def early() -> None:
        k.moved("stage", "previous")
        k.ring.release("previous")
        await_products(k)

    k.consume(early)
    refused(k, "the consumer releases 'previous' of 'ring', which 's' still needs")


def test_operands_overwritten_while_products_read_them(k: Tiny) -> None:
    k.produce()

    def early() -> None:
        k.writes("factor")
        done(k)

    k.consume(early)
    refused(k, "the consumer overwrites 'factor', which products still read")


def test_results_of_no_products(k: Tiny) -> None:
    with k.role("consumer"), pytest.raises(PipelineError, match="waits for 'd', to which no products are added"):
        results(k, "d")


def test_threads_that_fill(k: Tiny) -> None:
    """Those of both consumers fill a stage of a relay."""
    relay = Relay(k, "sums", 2, first=5, fills=256, waiting=32)
    with k.role("consumer", groups=1):
        relay.acquire()
        relay.fill()
    with k.role("writer"):
        relay.wait()
        relay.release()
    refused(k, "128 arrivals fill a stage of pipeline 'sums', which expects 256")


def test_a_meeting_to_which_not_all_come(k: Tiny) -> None:
    meeting = Meeting(k, "numbers", 4, reader=32, consumer=128)
    with k.role("reader"), k.loop("for (;;)"):
        meeting.sync()
    with k.role("consumer"):
        meeting.sync()
    refused(k, "the reader and the consumer do not meet equally often at 'numbers'")


def test_a_meeting_of_others(k: Tiny) -> None:
    meeting = Meeting(k, "numbers", 4, reader=32, consumer=128)
    with k.role("writer"):
        meeting.sync()
    refused(k, "the writer is not expected at 'numbers'")


# ---- kernels of all forms of warpgroups


def gradients(how: dict[str, Any]) -> fg.Graph:
    return made(name="gradients", rows=1024, heads=4, shared=2, forward=False, **how)


def forward() -> fg.Graph:
    g = fg.Graph("forward", io_dtype="bfloat16")
    q, k, v = (g.tensor(name, (2, 4, 1024, 64)) for name in "qkv")
    g.output(g.sdpa(q, k, v, **CAUSAL), name="o")
    return g


def contraction() -> fg.Graph:
    g = fg.Graph("contraction", io_dtype="bfloat16")
    g.output(g.tensor("a", (4096, 4096)) @ g.tensor("b", (4096, 4096)), name="c")
    return g


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Trace]]:
    """Collects what kernels that have pipelines do, as they are rendered."""
    found: list[Trace] = []
    check = Trace.check

    def kept(trace: Trace) -> None:
        check(trace)
        found.extend([trace] if trace.pipelines else [])

    with monkeypatch.context() as patched:
        patched.setattr(Trace, "check", kept)
        yield found


def accepted(trace: Trace) -> bool:
    try:
        trace.check()
    except PipelineError:
        return False
    return True


@pytest.mark.parametrize("form", GRADIENTS)
def test_a_call_left_out_is_a_mistake(form: str, traces: list[Trace]) -> None:
    """Whichever call it is that waits, arrives, or says how much is copied."""
    how, options = GRADIENTS[form]
    plan(gradients(how), options, choose=HOPPER)
    every = traces.copy()
    assert every
    for trace in every:
        for n, event in enumerate(trace.events):
            less = Trace([*trace.events[:n], *trace.events[n + 1 :]], trace.pipelines, trace.meetings)
            assert event.what not in CALLS or not accepted(less), event


@pytest.mark.parametrize(
    "graph",
    [forward(), contraction(), *(gradients(GRADIENTS[form][0]) for form in ("fused", "separate"))],
    ids=["forward", "contraction", "fused", "separate"],
)
def test_a_kernel_without_a_line_is_refused(
    graph: fg.Graph, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(graph, choose=HOPPER)
    if not traces:
        pytest.skip("the roles of this form are not traced")
    monkeypatch.setattr(Pipeline, "release", lambda *_, **__: None)
    with pytest.raises(PipelineError, match=r"waits for a stage of .*does not release it"):
        plan(graph, choose=HOPPER)
