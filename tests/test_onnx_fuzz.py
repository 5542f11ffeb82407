"""Random ONNX models with named dimensions, compiled once, against onnx's own evaluator in float64 at several sizes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from random_models import Drawn, models  # noqa: E402

import fusegraph as fg  # noqa: E402
from fusegraph.runtime import host_compiler  # noqa: E402

#: For long runs: the number of models, and the engine.
COUNT, ENGINE = int(os.environ.get("FUSEGRAPH_FUZZ_COUNT", "3")), os.environ.get("FUSEGRAPH_FUZZ_ENGINE", "cpu")
FUZZ = settings(
    max_examples=COUNT,
    deadline=None,
    derandomize=os.environ.get("FUSEGRAPH_FUZZ") != "random",
    database=None,
    phases=(Phase.generate, Phase.shrink) if COUNT > 3 else (Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def check(drawn: Drawn, engine: str = ENGINE) -> bool:
    """Compares a model with onnx's evaluator at all of its sizes; tells whether it is one graph for all of them."""
    dims = {name: fg.Dim(name, *ends) for name, ends in drawn.bounds.items()}
    loaded = fg.onnx.from_proto(drawn.proto("float"), shapes=dims)
    run, oracle = loaded.compile(engine), ReferenceEvaluator(drawn.proto("double"))
    for number, sizes in enumerate(drawn.choices):
        arrays = drawn.arrays(number)
        expected = oracle.run(None, {name: x.astype(np.float64) for name, x in arrays.items()})
        got = run(*arrays.values())
        for name, found, true in zip(drawn.outputs, got if isinstance(got, tuple) else (got,), expected, strict=True):
            assert found.shape == true.shape == tuple(along[number] for along in drawn.shapes[name]), (name, sizes)
            scale = float(np.abs(true).max(initial=1))
            np.testing.assert_allclose(found, true, rtol=1e-3, atol=1e-4 * scale, err_msg=f"{name} at {sizes}")
    return loaded.by_size is None


def test_random_models_of_named_dimensions() -> None:
    @FUZZ
    @given(models())
    def some(drawn: Drawn) -> None:
        check(drawn)

    some()
