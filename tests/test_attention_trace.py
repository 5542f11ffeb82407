"""What the roles of attention's kernels on Hopper do with barriers and products is checked when a kernel is written."""

from __future__ import annotations

import pytest
from test_attention import CAUSAL, HOPPER, made

import codegen
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule, schedules
from codegen.trace import PipelineError, Trace
from fusegraph.plan import plan


@pytest.fixture(scope="module", params=[1, 2])
def trace(request: pytest.FixtureRequest) -> Trace:
    """What happens with one tile of queries in shared memory, and with two, of which one begins as the other ends."""
    (kernel,) = plan(made(rows=512, depth=128, heads=2, **CAUSAL)).kernels
    spec = kernel.group.lowered.spec
    schedule = AttentionWgmmaSchedule(2, 128, 2, pingpong=True, ahead=request.param)
    assert schedules(spec, HOPPER)
    seen: list[Trace] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trace, "check", lambda self: seen.append(self))
        codegen.render(spec, schedule)
    return seen[0]


def test_all_is_well(trace: Trace) -> None:
    trace.check()


@pytest.mark.parametrize("what", ["acquire", "expect", "copy", "wait", "release", "await"])
def test_nothing_can_be_left_out(trace: Trace, what: str) -> None:
    several = [n for n, event in enumerate(trace.events) if event.what == what]
    if trace.events[several[-1]] is trace.events[-1]:
        several.pop()  # awaits products that are done, for the compiler's sake
    assert several
    for n in several:
        with pytest.raises(PipelineError):
            Trace([e for k, e in enumerate(trace.events) if k != n], trace.pipelines, trace.meetings).check()
