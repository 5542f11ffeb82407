"""Softmax and the norms: what they are made of, one kernel each, right against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import QUICK_ARCHS, check_all, check_on_gpu, compile_for, executables, leave_out_pass, quick, share

import fusegraph as fg
from codegen import target
from fusegraph.engines.reference import evaluate
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from fusegraph.ops import Kind
from fusegraph.passes.decompose import decompose
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import check_executable, random_inputs, run
from fusegraph.runtime import nvrtc

Make = Callable[[fg.Graph, fg.Tensor], fg.Tensor]


def weights(g: fg.Graph, x: fg.Tensor, axes: tuple[int, ...] = (-1,)) -> tuple[fg.Tensor, fg.Tensor]:
    """Adds inputs for scale and bias over the normalized dimensions."""
    axes = tuple(a % x.rank for a in axes)
    shape = tuple(n if d in axes else 1 for d, n in enumerate(x.shape))
    return g.tensor("scale", shape), g.tensor("bias", shape)


def layernorm(g: fg.Graph, x: fg.Tensor, axes: tuple[int, ...] = (-1,), **how: Any) -> fg.Tensor:
    return g.layernorm(x, *weights(g, x, axes), axes, **how)


def rmsnorm(g: fg.Graph, x: fg.Tensor, axes: tuple[int, ...] = (-1,), **how: Any) -> fg.Tensor:
    return g.rmsnorm(x, weights(g, x, axes)[0], axes, **how)


MADE: dict[str, Make] = {
    "softmax": lambda g, x: g.softmax(x),
    "log_softmax": lambda g, x: g.log_softmax(x),
    "logsumexp": lambda g, x: g.logsumexp(x),
    "logsumexp dropped": lambda g, x: g.logsumexp(x, keepdims=False),
    "layernorm": layernorm,
    "rmsnorm": rmsnorm,
}


def graph_of(make: Make, shape: tuple[int, ...], dtype: str = "float32", name: str = "g", **how: Any) -> fg.Graph:
    g = fg.Graph(name, io_dtype=dtype)
    g.output(make(g, g.tensor("x", shape, **how)), name="y")
    return g


def norm_block(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Builds residual add, norm, activation, residual add: one kernel."""
    h = g.output(x + g.tensor("residual", x.shape), name="h")
    return g.gelu(layernorm(g, h)) + h


def masked_softmax(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    mask = g.cmp_ge(g.gen_index(x, axis=-2), g.gen_index(x, axis=-1))
    return g.softmax(g.binary_select(x * 0.125, -3e4, mask))


@pytest.mark.parametrize("length", quick(33, 1, 2, 31, 1000, 4097, 65537))
def test_rows_of(length: int) -> None:
    graphs = [graph_of(make, (3, length)) for make in MADE.values()]
    assert [len(plan(g).kernels) for g in graphs] == [1] * len(graphs)
    check_all(graphs)


@pytest.mark.parametrize("dtype", quick("bfloat16", "float16", "float64", "float8_e4m3", "float8_e5m2"))
def test_dtypes(dtype: str) -> None:
    graphs = [graph_of(make, (7, 96), dtype) for make in MADE.values()]
    assert [len(plan(g).kernels) for g in graphs] == [1] * len(graphs)
    check_all(graphs)
    check_all(graphs, strict=True)


def test_axes_and_layouts() -> None:
    shape = (3, 4, 5, 6)
    graphs = [graph_of(lambda g, x, a=a: g.softmax(x, a), shape) for a in (0, 1, -2)]
    for axes in ((1,), (1, 2), (2, 3), (0, 3)):
        graphs += [graph_of(lambda g, x, a=axes: layernorm(g, x, a), shape, layout=lay) for lay in ("NCHW", "NHWC")]
        graphs.append(graph_of(lambda g, x, a=axes: rmsnorm(g, x, a), shape))
        graphs += [graph_of(lambda g, x, a=axes, k=k: g.logsumexp(x, a, k), shape) for k in (True, False)]
    assert [len(plan(g).kernels) for g in graphs] == [1] * len(graphs)
    check_all(graphs)
    assert graph_of(layernorm, shape, layout="NHWC").outputs[0].strides == (120, 1, 24, 4)


def test_the_reference_is_what_the_nodes_compute() -> None:
    """A composite's NumPy meaning and that of the nodes that it is made of agree to the last digits of float64."""
    for make in MADE.values():
        g = graph_of(make, (5, 40), "float64")
        inputs = random_inputs(g, 1)
        parts = decompose(g)
        whole, made = evaluate(g, inputs), evaluate(parts.graph, inputs)
        assert all(n.kind is not Kind.COMPOSITE for n in parts.graph.nodes)
        np.testing.assert_allclose(made[parts.graph.outputs[0]], whole[g.outputs[0]], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("op", "size"), [("log_softmax_backward", 450.0), ("local_response_norm_backward", 1e25)])
def test_float64_is_computed_in_float64_whatever_the_operands(op: str, size: float) -> None:
    g = fg.Graph(op)
    loss, y = g.tensor("loss", (4, 6, 8), "float64"), g.tensor("y", (4, 6, 8), "float32")
    g.output(getattr(g, op)(loss, y))
    (executable,) = executables([g])
    inputs = {name: array * (size if name == "y" else 1) for name, array in random_inputs(g, 1).items()}
    result = check_executable(executable, inputs)
    assert result.ok, result
    assert not any(o.undecided for o in result.outputs)


def test_fused_with_what_surrounds_them() -> None:
    graphs = [
        graph_of(make, (8, 96), dtype) for make in (norm_block, masked_softmax) for dtype in ("float32", "float16")
    ]
    for g in graphs:
        (kernel,) = plan(g).kernels
        assert kernel.group.family == "rows"
    check_all(graphs)
    check_all(graphs, fusion=False)


def test_rows_that_are_wanted_twice_are_kept_once() -> None:
    """layernorm(x) * x: both factors are made of the row's 16-bit words, instead of keeping them as floats."""
    graphs = [graph_of(lambda g, x: layernorm(g, x) * x, (1024, 4096), d) for d in ("bfloat16", "float16", "float32")]
    sources = [plan(g, choose=by_cost_model(target("sm_90a"))).kernels[0].source for g in graphs]
    assert [s.code.count("reread(x_v[u]);") for s in sources] == [1, 1, 0]
    (compiled,) = nvrtc.compile_kernels(sources[:1], "sm_90a")
    assert (compiled.spill_bytes, compiled.registers <= 128) == (0, True)
    check_all([graph_of(lambda g, x: layernorm(g, x) * x, (2, 4096), d) for d in ("bfloat16", "float16")])


def test_names_that_are_taken() -> None:
    """Parts of a composite make way for tensors of those names."""
    g = fg.Graph("taken")
    x = g.tensor("y max", (4, 16))
    s = g.softmax(x, name="y")
    g.output(s)
    g.output(s * g.tensor("y exp", (4, 16)), name="y sum")
    assert len(plan(g).kernels) == 1
    check_all([g])


def test_large_offsets_and_magnitudes() -> None:
    """Norms of numbers of mean 1e4 and spread 1; softmax where exp would overflow."""
    made = executables([graph_of(layernorm, (4, 5000)), graph_of(MADE["softmax"], (4, 5000))])
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((4, 5000)) + 1e4).astype(np.float32)
    ones = {"scale": np.ones((1, 5000), np.float32), "bias": np.zeros((1, 5000), np.float32)}
    (y,) = run(made[0], {"x": x, **ones}).values()
    exact = x.astype(np.float64)
    expected = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    assert np.abs(y - expected).max() < 2e-3  # the mean is rounded to a float32, which is 1e-3 at 1e4
    (y,) = run(made[1], {"x": x * 100}).values()
    e = np.exp(x.astype(np.float64) * 100 - x.max(1, keepdims=True) * 100.0)
    assert np.abs(y - e / e.sum(1, keepdims=True)).max() < 1e-1
    assert np.abs(y.astype(np.float64).sum(1) - 1).max() < 1e-5


def test_infinite_and_missing_numbers() -> None:
    names = ("softmax", "log_softmax", "logsumexp")
    made = executables([graph_of(MADE[name], (5, 64)) for name in names])
    x = np.zeros((5, 64), np.float32)
    x[0], x[1, 3], x[2, :63], x[3], x[4, 0] = -np.inf, np.nan, -np.inf, 3e38, np.inf
    softmax, log_softmax, logsumexp = (next(iter(run(e, {"x": x}).values())) for e in made)
    assert np.isnan(softmax[[0, 1, 4]]).all()
    assert (softmax[2, 63], softmax[2, 0], softmax[3, 0]) == (1, 0, 1 / 64)
    assert (log_softmax[2, 63], log_softmax[2, 0]) == (0, -np.inf)
    assert (logsumexp[0, 0], logsumexp[2, 0], logsumexp[4, 0]) == (-np.inf, 0, np.inf)
    assert np.isnan(logsumexp[1, 0])


def test_no_elements() -> None:
    """Of rows of no elements there is nothing to normalize, and the logarithm of their sum is that of 0."""
    check_all([graph_of(make, shape, name="none") for make in MADE.values() for shape in ((0, 8), (3, 0))])
    (found,) = run(executables([graph_of(MADE["logsumexp"], (3, 0))])[0], {"x": np.zeros((3, 0), np.float32)}).values()
    assert found.shape == (3, 1)
    assert (found == -np.inf).all()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda g, x: g.softmax(x, 2), AttributeValueError, "axis 2 is not one of the 2 axes"),
        (lambda g, x: g.softmax(x, (0,)), AttributeValueError, "axis is an integer"),
        (lambda g, x: g.softmax(g.cast(x, "int32")), DTypeError, "softmax does not take int32"),
        (lambda g, x: g.rmsnorm(x, g.tensor("w", (3,))), ShapeError, "do not broadcast"),
        (lambda g, x: g.rmsnorm(x, g.tensor("w", (2, 4, 8))), ShapeError, "does not broadcast to x"),
        (lambda g, x: g.rmsnorm(x, x, epsilon=-1.0), AttributeValueError, "epsilon is not negative"),
        (lambda g, x: g.logsumexp(x, keepdims=None), AttributeValueError, "keepdims is True or False"),
    ],
)
def test_refused(make: Make, error: type[GraphError], text: str) -> None:
    with pytest.raises(error, match=text):
        graph_of(make, (4, 8))


# ---- sources


def golden_graphs() -> dict[str, fg.Graph]:
    return {
        "softmax": graph_of(MADE["softmax"], (8192, 8192), "bfloat16", "softmax"),
        "softmax_long": graph_of(MADE["softmax"], (2048, 65536), "float32", "softmax_long"),
        "softmax_longest": graph_of(MADE["softmax"], (192, 1 << 20), "float32", "softmax_longest"),
        "layernorm": graph_of(layernorm, (16384, 1000), "float32", "layernorm"),
        "column_mean": graph_of(lambda g, x: g.reduction(x, "avg", 0, keepdims=False), (4096, 512), name="column_mean"),
        "column_norm": graph_of(lambda g, x: x / g.reduction(x, "norm2", 0), (512, 16384), "bfloat16", "column_norm"),
    }


@pytest.mark.parametrize("name", list(golden_graphs()))
def test_golden_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("column"):
        leave_out_pass(monkeypatch, "long reductions")
    (kernel,) = plan(golden_graphs()[name], choose=by_cost_model(target("sm_90a"))).kernels
    check_golden(name, kernel.source.code)


def gpu_graphs() -> list[fg.Graph]:
    graphs = [graph_of(make, (16, n), d) for make in MADE.values() for n in (33, 8192) for d in ("float32", "bfloat16")]
    return graphs + [graph_of(norm_block, (16, n), "bfloat16") for n in (1024, 8192, 65536)]


@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_compiles_for_gpus(arch: str) -> None:
    kernels = compile_for(arch, [*golden_graphs().values(), graph_of(norm_block, (16, 8192), "bfloat16")])
    assert [k.name for k in kernels if k.spill_bytes] == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_all_compile_for_gpus(arch: str) -> None:
    assert [k.name for k in compile_for(arch, share(arch, gpu_graphs())) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs())
