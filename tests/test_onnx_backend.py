"""The node tests of the package ``onnx``."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest
from typing import Any

import pytest

pytest.importorskip("onnx")

import onnx
import onnx.backend.test
from onnx.backend.test.runner import Runner
from onnx_node_tests import ENGINES, RESULTS, array, cases, inputs, run, summary

from fusegraph.frontends.onnx.table import TABLE
from fusegraph.onnx import Backend


@pytest.mark.slow
def test_the_node_tests_of_onnx() -> None:
    """As kernels on the CPU, and by the reference."""
    tests = cases()
    outcomes = run(tests, ENGINES)
    recorded = json.loads(RESULTS.read_text())
    for outcome in outcomes.values():
        if onnx.__version__ == recorded["onnx"]:
            assert not outcome.failed, "\n".join(f"{name}: {what}" for name, what in outcome.failed.items())
        else:  # another version has other tests, of operators that may have changed
            assert len(outcome.failed) < 0.03 * len(outcome.passed), "\n".join(outcome.failed.values())
    if onnx.__version__ == recorded["onnx"]:
        assert summary(outcomes) == recorded, "run python tests/onnx_node_tests.py and python tools/readme.py"


def smallest() -> list[Any]:
    """Returns for each operator of the table its node test with the fewest elements."""
    chosen: dict[str, Any] = {}
    for test in cases():
        nodes = test.model.graph.node
        if len(nodes) == 1 and (nodes[0].domain, nodes[0].op_type) in TABLE:
            other = chosen.get(nodes[0].op_type)
            if supported(test) and (other is None or size(test) < size(other)):
                chosen[nodes[0].op_type] = test
    assert set(chosen) >= {name for domain, name in TABLE if not domain} - WITHOUT
    return list(chosen.values())


def check(test: Any, results: Any) -> None:
    expected = [array(x) for x in test.data_sets[0][1]]
    Runner.assert_similar_outputs(expected, results, test.rtol, max(test.atol, 1e-5))


@pytest.mark.slow
@pytest.mark.gpu
def test_every_operator_on_a_gpu() -> None:
    for test in smallest():
        check(test, Backend.run_model(test.model, inputs(test), "CUDA"))


@pytest.mark.slow
def test_the_official_runner() -> None:
    """The package's own test cases, made for this backend."""

    class OnReference(Backend):
        @classmethod
        def prepare(cls, proto, device="CPU", **options):
            return super().prepare(proto, device, engine="reference", **options)

    runner = onnx.backend.test.BackendTest(OnReference, __name__).include("^test_(gemm|relu|attention_4d_gqa)_?.*_cpu$")
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, runner.test_cases.values()))
    found = unittest.TestResult()
    suite.run(found)
    assert found.testsRun > 2000
    assert not found.failures
    assert not found.errors


#: Operators of the table of which there is no node test of their own in a type that there is.
WITHOUT = frozenset({"GlobalLpPool"})


def size(test: Any) -> int:
    """Returns the number of elements of all inputs."""
    return sum(x.size for x in inputs(test).values())


def supported(test: Any) -> bool:
    return not run([test])["reference"].skipped


@pytest.mark.slow
def test_mutated_models_end_in_a_graph_or_an_error() -> None:
    """Bytes and parts of models changed, in a process of its own: nothing crashes it, or takes its time or memory."""
    count, script = 600, RESULTS.with_name("onnx_mutations.py")
    command = [sys.executable, str(script), "0", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ends = json.loads(done.stdout)["ends"]
    assert sum(ends.values()) == count
    assert "an error of pages" not in ends
    assert ends["run"] > 50
    assert ends["ModelError"] > 125
    assert ends["UnsupportedModelError"] > 50


def test_recorded_results_have_no_failures() -> None:
    recorded = json.loads(RESULTS.read_text())
    for engine in ENGINES:
        assert recorded["engines"][engine]["failed"] == {}
        assert recorded["engines"][engine]["passed"] > 1700
    assert sum(recorded["skipped"].values()) <= 150
