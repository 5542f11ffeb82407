"""Random programs of torch, compiled once with sizes that vary, against torch's eager mode in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from random_programs import Program, programs  # noqa: E402

import fusegraph.torch  # noqa: E402
from fusegraph.runtime import host_compiler  # noqa: E402


def check(program: Program) -> list[str]:
    """Compares a program with eager mode at all of its sizes; returns why graphs were compiled by size."""
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    function = program.function()
    compiled, built = torch.compile(program.function(), backend="fusegraph", dynamic=True), [0]
    original = host_compiler.build

    def counting(*given: Any, **how: Any) -> Any:
        built[0] += 1
        return original(*given, **how)

    host_compiler.build = counting
    try:
        for number, sizes in enumerate(program.choices):
            inputs = program.inputs(number)
            exact = [x.double() for x in inputs]
            for x, shape in zip(inputs, program.shapes.values()):
                for axis, n in enumerate(shape):
                    if isinstance(n, str):
                        torch._dynamo.maybe_mark_dynamic(x, axis)
                    else:
                        torch._dynamo.mark_static(x, axis)
            graphs, before = len(fusegraph.torch.report()), built[0]
            with torch.no_grad():
                got, expected = compiled(*inputs), function(*exact)
            for found, true in zip((*got, *inputs), (*expected, *exact), strict=True):
                torch.testing.assert_close(found.double(), true, rtol=1e-3, atol=1e-4 * max(1, float(true.abs().amax()) if true.numel() else 1))
            reports = fusegraph.torch.report()
            if number and len(reports) == graphs and not any(r.by_size for r in reports):
                assert built[0] == before, f"kernels are compiled at {sizes}"
    finally:
        host_compiler.build = original
    return [r.by_size for r in fusegraph.torch.report()]
