"""Random ONNX models with named dimensions, compiled once, against onnx's own evaluator in float64 at several sizes.

FUSEGRAPH_FUZZ_COUNT in the environment is the number of models; with FUSEGRAPH_FUZZ=random they differ from run to run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("onnx")

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from onnx.reference import ReferenceEvaluator
from random_models import Drawn, models

import fusegraph as fg
from fusegraph.engines.sized import SizedExecutable
from fusegraph.runtime import host_compiler

FUZZ = settings(
    max_examples=int(os.environ.get("FUSEGRAPH_FUZZ_COUNT", "10")),
    deadline=None,
    derandomize=os.environ.get("FUSEGRAPH_FUZZ") != "random",
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def check(drawn: Drawn, engine: str = "cpu") -> bool:
    """Compares a model with onnx's evaluator at all of its sizes; tells whether it is one graph for all of them.

    If it is, and kernels for all sizes are planned ahead, none is compiled in a call.
    """
    dims = {name: fg.Dim(name, *ends) for name, ends in drawn.bounds.items()}
    loaded = fg.onnx.from_proto(drawn.proto("float"), shapes=dims)
    run, oracle = loaded.compile(engine), ReferenceEvaluator(drawn.proto("double"))
    ahead = isinstance(run, SizedExecutable) and bool(run.plans) and not any(plan.by_size for plan in run.plans)
    with pytest.MonkeyPatch.context() as patch:
        if ahead:
            patch.setattr(host_compiler, "build", _refused)
        for number, sizes in enumerate(drawn.choices):
            arrays = drawn.arrays(number)
            expected = oracle.run(None, {name: x.astype(np.float64) for name, x in arrays.items()})
            found = run(*arrays.values())
            _compare(drawn, number, found if isinstance(found, tuple) else (found,), expected, str(sizes))
    return loaded.by_size is None


def _refused(kernels: Sequence[Any], **_: Any) -> Any:
    raise AssertionError(f"{', '.join(kernel.name for kernel in kernels)} compiled in a call")


def _compare(drawn: Drawn, number: int, found: Sequence[Any], expected: Sequence[Any], where: str) -> None:
    for name, got, true in zip(drawn.outputs, found, expected, strict=True):
        assert got.shape == true.shape == tuple(along[number] for along in drawn.shapes[name]), f"{name} at {where}"
        most = float(np.abs(true).max(initial=1))
        np.testing.assert_allclose(got, true, rtol=1e-3, atol=1e-4 * most, err_msg=f"{name} at {where}")


def test_random_models_of_named_dimensions() -> None:
    @FUZZ
    @given(models())
    def some(drawn: Drawn) -> None:
        check(drawn)

    some()
