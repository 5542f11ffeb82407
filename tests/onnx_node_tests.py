"""The node tests that the package ``onnx`` ships, run by the backend: which pass, and why others are left out.

python tests/onnx_node_tests.py writes tests/onnx_node_tests.json, of which README.md has a table.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from fusegraph.errors import UnsupportedModelError
from fusegraph.frontends.onnx.table import TABLE
from fusegraph.onnx import Backend

RESULTS = Path(__file__).with_suffix(".json")
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass
class Outcome:
    """passed: names of tests.  skipped: name -> reasons.  failed: name -> what went wrong."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def cases() -> list[Any]:
    """All node tests, with their data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[Any] = load_model_tests(kind="node")
    return found


def array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def strict(model: onnx.ModelProto) -> bool:
    """Whether each result is rounded, as ONNX's evaluator does.  Sums of 16-bit numbers are rounded once, as ours."""
    every = (*model.graph.input, *model.graph.output)
    return all(value.type.tensor_type.elem_type not in _HALVES for value in every)


def run(tests: list[Any], engine: str = "reference") -> Outcome:
    """Every test within its own tolerance.  What the importer has nothing for is skipped; nothing else is."""
    outcome = Outcome()
    for test in tests:
        try:
            rep = Backend.prepare(test.model, engine=engine, strict=strict(test.model))
            for inputs, outputs in test.data_sets:
                results = rep.run([array(x) for x in inputs])
                Runner.assert_similar_outputs([array(x) for x in outputs], results, test.rtol, test.atol)
            outcome.passed.append(test.name)
        except UnsupportedModelError as error:
            outcome.skipped[test.name] = error.reasons
        except Exception as error:  # a failure, whatever it is
            outcome.failed[test.name] = f"{type(error).__name__}: {error}"
    return outcome


def summary(outcome: Outcome) -> dict[str, Any]:
    """What README.md says of a run: numbers, each test that is skipped counted under its first reason."""
    reasons = Counter(reasons[0] for reasons in outcome.skipped.values())
    return {
        "onnx": onnx.__version__,
        "operators": len(TABLE),
        "passed": len(outcome.passed),
        "skipped": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        "failed": outcome.failed,
    }


if __name__ == "__main__":
    found = summary(run(cases()))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['passed']} passed, {sum(found['skipped'].values())} skipped, {len(found['failed'])} failed")
