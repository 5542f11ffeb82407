"""compare: who is right and who is faster, what a refusal, a failure and a wrong result become."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import fusegraph as fg
from fusegraph.cli import main
from fusegraph.cli.compare import chosen
from fusegraph.dtypes import bfloat16, float8_e4m3
from fusegraph.engines.reference import ReferenceExecutable
from fusegraph.errors import (
    ArgumentError,
    CompileError,
    DeviceError,
    FusegraphError,
    GraphError,
    KernelError,
    NotSupportedError,
)
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.report import compare as report
from fusegraph.report import eager
from fusegraph.report.check import LIBRARY_SLACK, check_executable, compare, placed, random_inputs, rounding_of
from fusegraph.report.compare import compare_engines
from fusegraph.runtime.arrays import CPU

#: Keys of ``compare --json``: of a graph, of an engine there, of its outputs, of a difference between two.
GRAPH_KEYS = ("name", "seed", "ok", "engines", "differences")
ENGINE_KEYS = ("engine", "status", "ok", "reason", "us", "timing", "build_s", "kernels", "workspace_bytes", "note")
ENGINE_KEYS += ("outputs",)
OUTPUT_KEYS = ("name", "max_abs_error", "rel_error", "undecided", "wrong", "worst", "ok")
DIFFERENCE_KEYS = ("output", "engines", "max_abs", "rel", "unequal")

FMA = """
import fusegraph as fg
graph = fg.Graph("fma")
a, b, c = (graph.tensor(name, (8, 33)) for name in "abc")
graph.output(graph.sigmoid(a + b * c), name="y")
"""


def fma(dtype: str = "float32") -> fg.Graph:
    graph = fg.Graph("fma", io_dtype=dtype)
    a, b, c = (graph.tensor(name, (8, 33)) for name in "abc")
    graph.output(graph.sigmoid(a + b * c), name="y")
    return graph


class Fake(ReferenceExecutable):
    """An engine that gives the reference's results, or others, on the CPU."""

    def __init__(self, graph, engine="cudnn", *, change=None, error=None, plans=()):
        super().__init__(graph)
        self.engine, self.change, self.error = engine, change, error
        if plans:
            self.plans = [SimpleNamespace(name=name) for name in plans]

    def __call__(self, *args, **options):
        if self.error:
            raise self.error
        result = super().__call__(*args, **options)
        if self.change is not None:
            self.change(result)
        return result


@pytest.fixture
def engines(monkeypatch):
    """Sets the engines by name: an Executable, or the error of building it; the reference stays."""
    made: dict[str, object] = {}

    def build(graph, engine, **options):
        if engine == "reference":
            return ReferenceExecutable(graph)
        result = made[engine]
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(report, "compile_graph", build)
    return made


@pytest.fixture
def tell(tmp_path, tell):
    """Compares the graphs of a text: (status, object on stdout, stderr)."""

    def compare(text, *arguments):
        path = tmp_path / "graphs.py"
        path.write_text(text)
        return tell("compare", str(path), *arguments)

    return compare


# --- on real engines


def test_json(tell):
    status, told, _ = tell(FMA, "--engines", "cpu,reference", "--seed", "3")
    assert status == 0
    assert set(told) == {"graphs"}
    (graph,) = told["graphs"]
    assert set(graph) == set(GRAPH_KEYS)
    assert (graph["name"], graph["seed"], graph["ok"]) == ("fma", 3, True)
    assert [e["engine"] for e in graph["engines"]] == ["cpu", "reference"]
    for engine in graph["engines"]:
        assert set(engine) == set(ENGINE_KEYS)
        assert (engine["status"], engine["ok"], engine["reason"]) == ("ran", True, "")
        assert engine["us"] > 0
        assert engine["build_s"] > 0
        assert engine["timing"].startswith("CPU, wall clock, best of ")
        (output,) = engine["outputs"]
        assert set(output) == set(OUTPUT_KEYS)
        assert (output["name"], output["ok"], output["wrong"]) == ("y", True, 0)
        assert output["max_abs_error"] > 0
    cpu, reference = graph["engines"]
    assert cpu["kernels"] == ["fma_kernel"]
    assert (cpu["workspace_bytes"], reference["workspace_bytes"]) == (0, None)
    (difference,) = graph["differences"]
    assert set(difference) == set(DIFFERENCE_KEYS)
    assert (difference["output"], difference["engines"]) == ("y", ["cpu", "reference"])
    assert 0 < difference["max_abs"] < 1e-6
    assert 0 < difference["unequal"] < 8 * 33


def test_text_and_an_engine_that_is_not_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    path = tmp_path / "graphs.py"
    path.write_text(FMA)
    assert main(["compare", str(path), "--engines", "reference,torch"]) == 0
    out = capsys.readouterr().out
    assert "fma, inputs of seed 0" in out
    assert "refused: torch cannot be imported" in out
    assert "ratio" in out


def test_no_engine_ran(tell, engines):
    engines["cuda"] = DeviceError("no CUDA driver")
    engines["cudnn"] = NotSupportedError("cuDNN refuses graph 'fma' (mul 'm'): no plan")
    status, told, stderr = tell(FMA)  # cuda,cudnn is the default
    (graph,) = told["graphs"]
    assert (status, graph["ok"], graph["differences"]) == (0, None, [])
    assert [(e["status"], e["ok"], e["us"]) for e in graph["engines"]] == [("refused", None, None)] * 2
    assert graph["engines"][1]["reason"] == "cuDNN refuses graph 'fma' (mul 'm'): no plan"
    assert "fma: no engine ran, so nothing was compared" in stderr


# --- what is wrong


def test_a_wrong_engine(tell, engines, tmp_path, capsys):
    def change(result):
        result[2, 5] += 0.001

    graph = fma()
    engines["cudnn"] = Fake(graph, change=change, plans=("engine 7", "engine 8"))
    status, told, stderr = tell(FMA, "--engines", "cudnn,reference")
    (entry,) = told["graphs"]
    assert (status, entry["ok"]) == (1, False)
    cudnn, reference = entry["engines"]
    assert (cudnn["status"], cudnn["ok"], reference["ok"]) == ("ran", False, True)
    assert cudnn["kernels"] == ["engine 7", "engine 8"]
    assert cudnn["outputs"][0]["wrong"] == 1
    assert "at [2, 5]" in cudnn["outputs"][0]["worst"]
    assert entry["differences"][0]["unequal"] == 1
    assert entry["differences"][0]["max_abs"] == pytest.approx(0.001, rel=1e-3)
    assert "1 of 1 graphs are wrong on an engine: fma" in stderr
    assert main(["compare", str(tmp_path / "graphs.py"), "--engines", "cudnn,reference"]) == 1
    out = capsys.readouterr().out
    assert "cudnn, y: 1 elements outside their bound, one at [2, 5] got" in out
    assert "engine 7, engine 8" in out


@pytest.mark.parametrize(
    ("engine", "error", "status"),
    [
        ("cuda", KernelError("a barrier was not reached"), "failed"),
        ("cuda", DeviceError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS"), "failed"),
        ("cuda", DeviceError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"), "refused"),
        ("cpu", MemoryError(), "refused"),
        ("cudnn", RuntimeError("CUDNN_STATUS_EXECUTION_FAILED"), "failed"),
    ],
)
def test_errors_of_a_call(engine, error, status, engines):
    engines[engine] = Fake(fma(), engine, error=error)
    result = compare_engines(fma(), [engine, "reference"])
    assert [e.status for e in result.engines] == [status, "ran"]
    assert result.engines[0].ok == (False if status == "failed" else None)
    assert type(error).__name__ in result.engines[0].reason
    assert result.ok == (status == "refused")


@pytest.mark.parametrize(
    ("engine", "error", "status"),
    [
        ("cuda", CompileError("identifier undefined"), "failed"),
        ("cuda", ZeroDivisionError(), "failed"),
        ("cudnn", RuntimeError("an error of the frontend"), "refused"),
        ("cpu", fg.errors.ToolchainError("no C++ compiler"), "refused"),
    ],
)
def test_errors_of_a_build(engine, error, status, engines):
    engines[engine] = error
    result = compare_engines(fma(), [engine])
    assert result.engines[0].status == status
    assert result.ok is (False if status == "failed" else None)


def test_a_graph_without_outputs(engines):
    graph = fg.Graph("empty")
    graph.tensor("a", (4,))
    with pytest.raises(GraphError, match="'empty' has no outputs"):
        compare_engines(graph, ["reference"])


def test_names_of_engines(tell):
    assert chosen(["cpu,cuda", " cpu ,torch"]) == ["cpu", "cuda", "torch"]
    with pytest.raises(FusegraphError, match="'tpu' is none of cuda, cudnn, torch, cpu, reference"):
        chosen(["cpu,tpu"])
    status, told, _ = tell(FMA, "--engines", "tpu")
    assert (status, told["error"]["type"]) == (2, "FusegraphError")


def test_options_reach_the_engines(tell, monkeypatch):
    seen = []

    def build(graph, engine, **options):
        seen.append(options)
        return Fake(graph, engine)

    monkeypatch.setattr(report, "compile_graph", build)
    tell(FMA, "--engines", "cudnn", "--partition", "--autotune", "--strict")
    cache = seen[0].pop("cache")
    assert cache.limit_bytes == 0
    assert seen == [{"strict": True, "partition": True, "autotune": True}]
    tell(FMA, "--engines", "cudnn")
    assert {k: v for k, v in seen[1].items() if k != "cache"} == {"strict": False, "partition": False, "autotune": None}


# --- differences, slack, arrays


def test_differences_of_numbers_that_are_none(engines):
    graph = fg.Graph("special")
    graph.output(graph.identity(graph.tensor("a", (6,))), name="y")

    def first(result):
        result[:] = [1, np.nan, np.inf, np.nan, 3, 0]

    def second(result):
        result[:] = [1, np.nan, np.inf, 2, 4, 0]

    engines["cudnn"], engines["cpu"] = Fake(graph, change=first), Fake(graph, "cpu", change=second)
    (difference,) = compare_engines(graph, ["cudnn", "cpu"]).differences
    assert (difference.max_abs, difference.unequal) == (1.0, 2)
    assert difference.rel == pytest.approx(1 / np.sqrt(17))


def test_libraries_may_lose_elements_close_to_zero():
    """x / 2 * (1 + erf(x / sqrt(2))) in float32 has no digits left at -5.5; ours must have all of them there."""
    graph = fg.Graph("gelu")
    graph.output(graph.gelu(graph.tensor("x", (2,))), name="y")
    inputs = {"x": np.array([-5.5, 4.0], np.float32)}
    outputs = {"y": np.array([0.0, 3.9998733], np.float32)}
    rounding = eager.Rounding()
    assert compare(graph, inputs, outputs, rounding)[0].wrong == 1
    assert compare(graph, inputs, outputs, rounding, slack=LIBRARY_SLACK)[0].ok
    far = {"y": outputs["y"] + np.float32(2e-5)}
    assert compare(graph, inputs, far, rounding, slack=LIBRARY_SLACK)[0].wrong == 2


def test_slack_is_for_floats_only():
    graph = fg.Graph("order")
    graph.output(graph.tensor("x", (2,)) > 0.0, name="y")
    outputs = {"y": np.array([True, True])}
    (check,) = compare(graph, {"x": np.array([-1, 1], np.float32)}, outputs, eager.Rounding(), slack=1.0)
    assert check.wrong == 1


def test_a_librarys_attention_may_round_the_operands_of_its_gradients():
    """Probabilities and gradients of products in bfloat16, as cuDNN multiplies them; but not less exact than that."""
    graph = fg.Graph("gradients", io_dtype="bfloat16")
    given = [*(graph.tensor(name, (1, 2, 40, 16)) for name in ("q", "k", "v", "o", "loss"))]
    every = graph.sdpa_backward(*given, graph.tensor("stats", (1, 2, 40, 1), "float32"), use_causal_mask=True)
    for number, tensor in enumerate(every):
        graph.output(tensor, name=f"y{number}")
    inputs = random_inputs(graph, 1)
    q, k, v, o, loss, stats = (x.astype(np.float64) for x in inputs.values())
    p = np.tril(np.exp(q @ k.swapaxes(-1, -2) / 4 - stats))
    by_product = p * (loss @ v.swapaxes(-1, -2) - (o * loss).sum(-1, keepdims=True)) / 4

    def result(dtype):
        weights, gradient = (x.astype(dtype).astype(np.float64) for x in (p, by_product))
        results = (gradient @ k, gradient.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ loss)
        return {f"y{n}": x.astype(bfloat16.numpy) for n, x in enumerate(results)}

    lowered = SimpleNamespace(spec=None)
    groups = (SimpleNamespace(family="cudnn", lowered=lowered, nodes=graph.nodes),)
    partition = SimpleNamespace(groups=groups, materialized=frozenset())
    notes = {key: {} for key in ("counterparts", "copies", "algorithms", "namesakes", "joined", "unscaled")}
    plan = SimpleNamespace(partition=partition, kernels=(), **notes)
    rounding = rounding_of(SimpleNamespace(plan=plan))
    assert all(c.ok for c in compare(graph, inputs, result(bfloat16.numpy), rounding, slack=LIBRARY_SLACK))
    exact = compare(graph, inputs, result(bfloat16.numpy), eager.Rounding(), slack=LIBRARY_SLACK)
    assert not any(c.ok for c in exact)
    coarse = compare(graph, inputs, result(float8_e4m3.numpy), rounding, slack=LIBRARY_SLACK)
    assert not any(c.ok for c in coarse)


def test_outputs_given_are_not_computed_again():
    graph = fma()
    inputs = random_inputs(graph)
    outputs = {"y": np.asarray(ReferenceExecutable(graph)(*inputs.values()))}
    broken = Fake(graph, "reference", error=RuntimeError("called"))
    assert check_executable(broken, inputs, outputs=outputs).ok
    assert not check_executable(broken, inputs, outputs={"y": outputs["y"] + 1}).ok
    with pytest.raises(ArgumentError, match="outputs without the inputs"):
        check_executable(broken, outputs=outputs)


def test_arrays_on_the_cpu_stay_where_they_are():
    array = np.zeros(3)
    assert placed(array, CPU) is array


# --- torch


def test_torch_knows_only_ops_of_the_table():
    class Anything:
        def __getattr__(self, name):
            return Anything()

    names = set(eager.pointwise(Anything())) | set(eager.composed(Anything()))
    assert {"add", "sigmoid", "cmp_eq", "gelu_approx_tanh", "binary_select"} <= names
    assert all(TABLE[name].kind is Kind.POINTWISE for name in names)
    missing = {op.name for op in TABLE.values() if op.kind is Kind.POINTWISE} - names
    # Casts are handled apart, and torch's random numbers are others.
    rest = {name for name in missing if not name.endswith("_backward")}
    assert rest == {"identity", "narrow", "bitcast", "rng_uniform", "rng_normal"}


def test_torch_gives_the_references_results():
    pytest.importorskip("torch")
    graph = fg.Graph("mixed", io_dtype="bfloat16")
    x, w = graph.tensor("x", (2, 6, 9, 8), layout="NHWC"), graph.tensor("w", (4, 3, 3, 2), layout="NHWC")
    bias, n = graph.tensor("bias", (4, 1, 1)), graph.tensor("n", (4, 1, 1), "int32")
    y = graph.conv_fprop(x, w, padding=((1, 0), (2, 1)), stride=(2, 1), mode="convolution")
    y = graph.swish(graph.relu(y + bias + n, upper_clip=3.0), beta=1.5) * 0.5
    graph.output(y, name="y")
    graph.output(graph.cast(y * 10.0, "int8"), name="whole")
    graph.output(graph.binary_select(y, y + 1.0, y > 0.25), name="chosen")
    result = compare_engines(graph, ["torch", "reference"])
    assert [e.status for e in result.engines] == ["ran", "ran"], result.engines[0].reason
    assert result.ok, result.engines[0].outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_torch_functions_mean_what_the_op_table_says(dtype):
    pytest.importorskip("torch")
    attributes = {"leaky_relu": {"negative_slope": 0.1}, "gen_index": {"axis": 1}, "clamp": {"min": -1, "max": 2}}
    attributes["narrow"] = {"dtype": "float16"}
    attributes["bitcast"] = {"dtype": {"float32": "int32", "bfloat16": "int16", "int32": "float32"}[dtype]}
    count = 0
    for op in TABLE.values():
        graph = fg.Graph(op.name, io_dtype=dtype)
        operands = [graph.tensor(key, (9, 40), "bool" if key in op.masks else None) for key in op.operands]
        if op.kind is not Kind.POINTWISE or op.name.endswith("_backward"):
            continue
        try:
            graph.output(graph.apply(op, operands, attributes.get(op.name, {})), name="result")
        except fg.errors.DTypeError:  # an op for floats only
            continue
        (result,) = compare_engines(graph, ["torch"]).engines
        assert (result.status, result.ok) == ("ran", True), (op.name, result)
        count += 1
    assert count > 20


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_torch_goes_along_an_axis_in_the_same_order(dtype):
    pytest.importorskip("torch")
    graph = fg.Graph("along", io_dtype=dtype)
    x = graph.tensor("x", (9, 40))
    for axis, turned in ((0, False), (1, True)):
        graph.output(graph.cumsum(x, axis, turned))
        graph.output(graph.sort(x, axis, turned))
        graph.output(graph.sort_index(x, axis, turned))
        graph.output(graph.topk(x, 3, axis, turned))
        graph.output(graph.topk_index(x, 3, axis, turned, "int64"))
    (result,) = compare_engines(graph, ["torch"]).engines
    assert (result.status, result.ok) == ("ran", True), result


def test_what_torch_cannot():
    pytest.importorskip("torch")
    graph = fg.Graph("gradient")
    graph.output(graph.relu_backward(graph.tensor("loss", (4,)), graph.tensor("x", (4,)), name="g"))
    (result,) = compare_engines(graph, ["torch"]).engines
    assert (result.status, result.reason) == ("refused", "no torch function for relu_backward 'g'")


@pytest.mark.gpu
def test_on_the_gpu(tell):
    status, told, _ = tell(FMA, "--engines", "cuda,cudnn,cpu,reference")
    (graph,) = told["graphs"]
    assert status == 0, graph
    cuda = graph["engines"][0]
    assert (cuda["status"], cuda["ok"]) == ("ran", True)
    assert cuda["timing"] == "GPU, cold L2, median of 15"
    assert 0 < cuda["us"] < 1000
    assert {"cuda", "cpu"} <= {name for d in graph["differences"] for name in d["engines"]}


@pytest.mark.gpu
def test_inputs_with_gaps_on_the_gpu():
    graph = fg.Graph("gaps")
    a, b = graph.tensor("a", (5, 7), strides=(16, 2)), graph.tensor("b", (5, 7), strides=(1, 0))
    graph.output(a + b, name="y", strides=(8, 1))
    result = compare_engines(graph, ["cuda", "cpu", "reference"])
    assert [e.status for e in result.engines] == ["ran"] * 3, result
    assert result.ok
