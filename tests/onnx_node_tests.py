"""The node tests that the package ``onnx`` ships, on the reference and as kernels: which pass, and why others are left
out.

python tests/onnx_node_tests.py writes tests/onnx_node_tests.json, of which docs/onnx.md has a table.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

from fusegraph.engines.base import Executable
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import UnsupportedModelError
from fusegraph.frontends.onnx.table import TABLE
from fusegraph.lowering.base import Options
from fusegraph.onnx import Backend, Model

#: Those that a table in docs/onnx.md has a column for: kernels on the CPU, and NumPy.
ENGINES = ("cpu", "reference")
#: Tests whose kernels one run of the host's compiler makes.
TOGETHER = 64
RESULTS = Path(__file__).with_suffix(".json")
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass
class Outcome:
    """passed: names of tests; exact: those of them whose results were held against the exact ones.  skipped: name ->
    reasons.  failed: name -> what went wrong.
    """

    passed: list[str] = field(default_factory=list)
    exact: list[str] = field(default_factory=list)
    skipped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def cases() -> list[Any]:
    """Returns all node tests, with their data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[Any] = load_model_tests(kind="node")
    return found


def array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def strict(model: onnx.ModelProto) -> bool:
    """Tells whether each result is rounded, as ONNX's evaluator does.  Sums of 16-bit numbers are rounded once, as
    ours.
    """
    every = (*model.graph.input, *model.graph.output)
    return all(value.type.tensor_type.elem_type not in _HALVES for value in every)


def run(tests: Sequence[Any], engines: Sequence[str] = ("reference",)) -> dict[str, Outcome]:
    """Runs every test on engines, by its own tolerance.  Only what the importer does not support is skipped."""
    outcomes = {engine: Outcome() for engine in engines}
    for first in range(0, len(tests), TOGETHER):
        ready: list[tuple[Any, Model, str, Executable]] = []
        for test in tests[first : first + TOGETHER]:
            try:
                model = Backend.prepare(test.model, engine="reference").model(inputs(test))
                ready += [(test, model, engine, _executable(test, model, engine)) for engine in engines]
            except UnsupportedModelError as error:
                for outcome in outcomes.values():
                    outcome.skipped[test.name] = error.reasons
            except Exception as error:  # a failure, whatever it is
                for outcome in outcomes.values():
                    outcome.failed[test.name] = f"{type(error).__name__}: {error}"
        build_together([made for *_, made in ready if isinstance(made, CpuExecutable)])
        for test, model, engine, executable in ready:
            outcome = outcomes[engine]
            try:
                if _check(test, model, executable):
                    outcome.exact.append(test.name)
                outcome.passed.append(test.name)
            except Exception as error:
                outcome.failed[test.name] = f"{type(error).__name__}: {error}"
    return outcomes


def inputs(test: Any) -> dict[str, Any]:
    """Returns the inputs of a test by name."""
    (data,) = test.data_sets
    names = (v.name for v in test.model.graph.input)
    return {name: array(x) for name, x in zip(names, data[0])}


def _executable(test: Any, model: Model, engine: str) -> Executable:
    """Returns a test's Executable, whose kernels are not built yet."""
    rounded = strict(test.model)
    if engine == "cpu":
        return CpuExecutable(model.graph, Options(strict=rounded), lazy=True)
    return model.compile(engine, strict=rounded)


def _check(test: Any, model: Model, executable: Executable) -> bool:
    """Raises AssertionError unless the results are those of the test.  Expected values have rounding errors of their
    own: where results are not within the test's tolerance of them, they must be within it of the exact ones.  Returns
    whether that was needed.
    """
    given = inputs(test)
    results = executable(*(given[name] for name in model.inputs))
    results = results if isinstance(results, tuple) else (results,)
    ((_, outputs),) = test.data_sets
    expected = [array(x) for x in outputs]
    try:
        Runner.assert_similar_outputs(expected, results, test.rtol, test.atol)
    except AssertionError:
        if any(x.dtype != y.dtype or x.shape != y.shape or not floats(x) for x, y in zip(results, expected)):
            raise
        for result, exact in zip(results, exactly(test.model, given)):
            np.testing.assert_allclose(result.astype(np.float64), exact, rtol=test.rtol, atol=test.atol)
        return True
    return False


def floats(x: Any) -> bool:
    return bool(x.dtype.kind == "f" or x.dtype.name == "bfloat16")


def exactly(model: onnx.ModelProto, given: dict[str, Any]) -> list[Any]:
    """Evaluates a model by ONNX's evaluator with all floats widened to 64 bits."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for message in messages(wide):
        if isinstance(message, TensorProto) and message.data_type in _FLOATS:
            message.CopyFrom(numpy_helper.from_array(array(message).astype(np.float64), message.name))
        elif isinstance(message, onnx.TypeProto.Tensor) and message.elem_type in _FLOATS:
            message.elem_type = TensorProto.DOUBLE
        elif isinstance(message, onnx.AttributeProto) and message.name in ("to", "dtype") and message.i in _FLOATS:
            message.i = TensorProto.DOUBLE
    inputs = {name: x.astype(np.float64) if floats(x) else x for name, x in given.items()}
    found: list[Any] = ReferenceEvaluator(wide).run(None, inputs)
    return found


def messages(message: Message) -> Iterator[Message]:
    """Yields a protocol buffer and all those in it."""
    yield message
    for what, value in message.ListFields():
        if what.type == FieldDescriptor.TYPE_MESSAGE:
            for each in value if what.is_repeated else [value]:
                yield from messages(each)


def summary(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Returns the numbers that docs/onnx.md gives for a run on several engines.

    Each skipped test is counted under its first reason; the skipped tests are the same on all engines, as the importer
    decides.
    """
    first, *others = outcomes.values()
    assert all(other.skipped == first.skipped for other in others)
    reasons = Counter(reasons[0] for reasons in first.skipped.values())
    return {
        "onnx": onnx.__version__,
        "operators": len(TABLE),
        "engines": {
            name: {"passed": len(o.passed), "exact": o.exact, "failed": o.failed} for name, o in outcomes.items()
        },
        "skipped": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    }


if __name__ == "__main__":
    found = summary(run(cases(), ENGINES))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for engine, counts in found["engines"].items():
        print(f"{engine}: {counts['passed']} passed, {len(counts['failed'])} failed: {', '.join(counts['failed'])}")
    print(f"{sum(found['skipped'].values())} skipped")
