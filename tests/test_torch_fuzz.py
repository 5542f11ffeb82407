"""Random programs of torch, compiled once with sizes that vary, against torch's eager mode in float64.

FUSEGRAPH_FUZZ_COUNT in the environment is the number of programs; with FUSEGRAPH_FUZZ=random they differ from run to
run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from random_programs import Program, programs  # noqa: E402

import fusegraph.torch  # noqa: E402
from fusegraph.runtime import host_compiler  # noqa: E402

FUZZ = settings(
    max_examples=int(os.environ.get("FUSEGRAPH_FUZZ_COUNT", "3")),
    deadline=None,
    derandomize=os.environ.get("FUSEGRAPH_FUZZ") != "random",
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yields a list that grows whenever kernels are compiled."""
    calls, build = list[int](), host_compiler.build

    def counting(kernels: Any, **how: Any) -> Any:
        calls.append(len(kernels))
        return build(kernels, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_compiler, "build", counting)
        yield calls


def check(program: Program) -> list[str]:
    """Compares results, and what is written to inputs, with eager mode; returns why graphs are compiled by size.

    Where torch traces nothing again, and kernels for all sizes are planned ahead, none is compiled after the first
    call.
    """
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    function = program.function()
    compiled = torch.compile(program.function(), backend="fusegraph", dynamic=True)
    with torch.no_grad(), counted() as calls:
        for number, sizes in enumerate(program.choices):
            inputs = program.inputs(number)
            exact = [x.double() for x in inputs]
            expected = function(*exact)
            graphs, before = len(fusegraph.torch.report()), len(calls)
            got = compiled(*inputs)
            for found, true in zip((*got, *inputs), (*expected, *exact), strict=True):
                most = max(1.0, float(true.abs().amax())) if true.numel() else 1.0
                torch.testing.assert_close(found.double(), true, rtol=1e-3, atol=1e-4 * most)
            reports = fusegraph.torch.report()
            if number and len(reports) == graphs and not any(report.by_size for report in reports):
                assert len(calls) == before, f"kernels are compiled at {sizes}"
    return [report.by_size for report in fusegraph.torch.report()]


def test_random_programs_of_sizes_that_vary() -> None:
    @FUZZ
    @given(programs())
    def some(program: Program) -> None:
        check(program)

    some()
