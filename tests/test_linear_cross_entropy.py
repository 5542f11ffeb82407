"""A linear layer with cross entropy, and its gradients: what they mean, their kernels, and the memory they take."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import Case, check_cases, families
from test_nvrtc_kernels import compiled

import fusegraph as fg
from codegen.spec import ContractionSpec
from codegen.target import target
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.lowering.base import Options
from fusegraph.ops import linear_cross_entropy as head
from fusegraph.plan import Plan, plan

torch = pytest.importorskip("torch")
REDUCTIONS = ("mean", "sum", "none")


def graph_of(
    rows: tuple[int, ...],
    depth: int,
    classes: int,
    dtype: Any = "float32",
    *,
    bias: bool = False,
    index: str = "int64",
    forward: bool = True,
    **attributes: Any,
) -> fg.Graph:
    """Returns a graph of the loss, unless only the gradients are asked for, and of these."""
    g = fg.Graph("head")
    wide = "float64" if dtype == "float64" else "float32"
    x, w = g.tensor("x", (*rows, depth), dtype), g.tensor("w", (classes, depth), dtype)
    target = g.tensor("target", rows, index)
    more = [g.tensor("bias", (classes,), dtype)] if bias else []
    if forward:
        loss, lse = g.linear_cross_entropy(x, w, target, *more, **attributes)
        g.output(loss)
        g.output(lse)
    else:
        lse = g.tensor("lse", rows, wide)
    upstream = g.tensor("upstream", rows if attributes.get("reduction") == "none" else (), wide)
    for gradient in g.linear_cross_entropy_backward(upstream, x, w, target, lse, *more, **attributes):
        g.output(gradient)
    return g


def inputs_of(graph: fg.Graph, ignored: int = -100) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    found = {}
    for t in graph.inputs:
        if t.dtype.is_int:
            value = rng.integers(0, graph.tensors["w"].shape[0], t.shape)
            found[t.name] = np.where(rng.random(t.shape) < 0.25, ignored, value).astype(t.dtype.numpy)
        elif t.name == "lse":
            found[t.name] = rng.uniform(30, 40, t.shape).astype(t.dtype.numpy)
        else:
            found[t.name] = rng.standard_normal(t.shape).astype(t.dtype.numpy)
    return found


@pytest.fixture
def in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients by logits are made in columns even where there are few."""
    monkeypatch.setattr(head, "LEAST_BYTES", 1)
    monkeypatch.setattr(head, "STEPS", (24,))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("reduction", "smoothing"), list(product(REDUCTIONS, [0.0, 0.3])))
def test_torch_means_the_same(reduction: str, smoothing: float, bias: bool) -> None:
    how: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 3}
    graph = graph_of((4, 5), 6, 9, "float64", bias=bias, **how)
    given = inputs_of(graph, ignored=3)
    found = fg.compile(graph, engine="reference")(**given)
    x, w, *b = (torch.tensor(given[k], requires_grad=True) for k in ("x", "w", *(["bias"] if bias else [])))
    logits = torch.nn.functional.linear(x, w, *b)
    target = torch.tensor(given["target"])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), **how)
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    wanted = [loss, logits.logsumexp(-1), *torch.autograd.grad(loss, (x, w, *b), torch.tensor(given["upstream"]))]
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_kernels(in_columns: None) -> None:
    graphs = [
        graph_of((70,), 40, 97, "float32"),
        graph_of((3, 23), 40, 136, "bfloat16", bias=True, reduction="none", label_smoothing=0.1),
        graph_of((129,), 64, 131, "float16", reduction="sum", index="int32", forward=False),
        graph_of((33,), 24, 50, "float64", bias=True, label_smoothing=0.2, ignore_index=2),
        graph_of((1,), 1, 1, "float32", bias=True),
        graph_of((2, 3), 5, 2, "float32", reduction="none"),
    ]
    cases = [Case(g, inputs=inputs_of(g, g.nodes[0].attributes["ignore_index"])) for g in graphs]
    made = check_cases(cases, guard=True)
    assert families(made[0]).count("contraction") > 3 * 3


def test_rows_that_do_not_count() -> None:
    """Whatever they hold, they add nothing."""
    graph = graph_of((5,), 8, 11, reduction="sum")
    given = inputs_of(graph)
    given["target"][:] = 1, -100, 4, -100, 0
    given["x"][[1, 3]] = 0
    wanted = fg.compile(graph, engine="cpu")(**given)
    given["x"][1], given["x"][3] = np.inf, np.nan
    loss, _, dx, _ = fg.compile(graph, engine="cpu")(**given)
    assert loss == wanted[0]
    np.testing.assert_array_equal(dx, wanted[2])


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("upstream", [1, np.nan])
def test_if_no_row_counts(upstream: float, engine: str) -> None:
    """The mean is NaN, and its gradients are 0, as in torch."""
    graph = graph_of((5,), 8, 11, bias=True)
    given = {**inputs_of(graph), "target": np.full(5, -100), "upstream": np.float32(upstream)}
    loss, _, *gradients = fg.compile(graph, engine=engine)(**given)
    assert np.isnan(loss)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0)


def test_if_no_row_counts_but_logsumexp() -> None:
    """Gradients that go through the logits, too, are 0 by the mean."""
    graph = fg.Graph("head")
    x, w, target = graph.tensor("x", (5, 8)), graph.tensor("w", (11, 8)), graph.tensor("target", (5,), "int64")
    loss, lse = graph.linear_cross_entropy(x, w, target)
    total = graph.reduction(lse, "add", keepdims=False)
    for of in (loss + total, total):
        for gradient in graph.gradients(of, [x, w]):
            graph.output(gradient)
    dx, dw, other_dx, other_dw = fg.compile(graph, engine="cpu")(**{**inputs_of(graph), "target": np.full(5, -100)})
    np.testing.assert_allclose(dx, other_dx, rtol=1e-5)
    np.testing.assert_allclose(dw, other_dw, rtol=1e-5)


def test_no_rows() -> None:
    graph = graph_of((0,), 8, 11, reduction="sum")
    loss, _, dx, dw = fg.compile(graph, engine="cpu")(**inputs_of(graph))
    assert loss == 0
    assert dx.shape == (0, 8)
    np.testing.assert_array_equal(dw, np.zeros((11, 8)))


def test_infinite_logits() -> None:
    """A class whose bias is minus infinity is no class; infinite ones decide, as in torch's logsumexp."""
    graph = graph_of((4,), 8, 11, bias=True, reduction="none")
    given = inputs_of(graph)
    given["target"][:] = 1, 2, 3, 4
    given["bias"][7] = -np.inf
    check_cases([Case(graph, inputs=given)])
    found = fg.compile(graph, engine="cpu")(**given)
    assert all(np.isfinite(y).all() for y in found)
    given["bias"][[5, 6]] = np.inf
    assert (fg.compile(graph, engine="cpu")(**given)[1] == np.inf).all()


def test_errors() -> None:
    g = fg.Graph("g")
    x, w, t = g.tensor("x", (4, 8)), g.tensor("w", (11, 8)), g.tensor("t", (4,), "int64")
    with pytest.raises(ShapeError, match=r"x is \[..., D\] and w \[V, D\]"):
        g.linear_cross_entropy(x, x[:, :3], t)
    with pytest.raises(ShapeError, match="one class for each row"):
        g.linear_cross_entropy(x, w, t[:3])
    with pytest.raises(ShapeError, match="bias has one element for each class"):
        g.linear_cross_entropy(x, w, t, g.tensor("b", (8,)))
    with pytest.raises(ShapeError, match="no classes"):
        g.linear_cross_entropy(x, g.tensor("none", (0, 8)), t)
    with pytest.raises(DTypeError, match="target holds integers"):
        g.linear_cross_entropy(x, w, g.tensor("f", (4,)))
    with pytest.raises(DTypeError, match="16 bits or more"):
        g.linear_cross_entropy(g.cast(x, "float8_e4m3"), w, t)
    with pytest.raises(AttributeValueError, match="between 0 and 1"):
        g.linear_cross_entropy(x, w, t, label_smoothing=1.5)
    with pytest.raises(AttributeValueError, match="'mean', 'sum' or 'none'"):
        g.linear_cross_entropy(x, w, t, reduction="avg")
    with pytest.raises(ShapeError, match=r"loss is \[\]"):
        g.linear_cross_entropy_backward(g.tensor("l", (4,)), x, w, t, g.tensor("lse", (4,)))


# ---- memory


@pytest.fixture(scope="module")
def gpt2() -> Plan:
    """The head of GPT-2 with a batch of 8 x 1024 tokens."""
    graph = graph_of((8, 1024), 768, 50257, "bfloat16")
    return plan(graph, Options(target=target("sm_90a")))


def test_peak_memory_is_a_tenth_of_the_logits(gpt2: Plan) -> None:
    assert gpt2.memory.size <= 8 * 1024 * 50257 * 2 / 10


def test_products_alone_read_and_write_much(gpt2: Plan) -> None:
    """Four products, all on tensor cores; what is beside them is not as large as the logits."""
    kernels = [k for k in gpt2.kernels if isinstance(k.group.lowered.spec, ContractionSpec)]
    assert len(kernels) % 3 == 1
    assert all("wgmma" in k.source.code for k in kernels)
    assert len(kernels[0].group.lowered.spec.partials) == 1
    rest = [k for k in gpt2.kernels if k not in kernels]
    assert len(rest) <= 6
    assert all(k.group.family == "rows" or k.group.writes[0].size <= 8 * 1024 for k in rest)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_no_kernel_spills(arch: str) -> None:
    graph = graph_of((4096,), 768, 50257, "bfloat16", bias=True, label_smoothing=0.1)
    made = plan(graph, Options(target=target(arch)))
    assert made.memory.size <= 4096 * 50257 * 2 / 8
    alike = {}  # kernels of most parts of the columns differ in which columns these are alone
    for k in made.kernels:
        alike[k.choice.schedule, re.sub(r"\d+", "", k.source.code.replace(k.name, ""))] = k.source
    compiled(list(alike.values()), arch)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Large enough for gradients by columns, and ragged."""
    rows, depth, classes = 3000, 264, 33333
    graph = graph_of((rows,), depth, classes, "bfloat16", bias=True, label_smoothing=0.1)
    x, w, bias = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((rows, depth), (classes, depth), classes)
    )
    target = torch.randint(0, classes, (rows,), device="cuda")
    target[::7] = -100
    w *= 0.1
    found = graph.compile("cuda")(x=x, w=w, target=target, bias=bias, upstream=torch.ones((), device="cuda"))
    given = [t.double().requires_grad_() for t in (x, w, bias)]
    logits = torch.nn.functional.linear(*given)
    loss = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    wanted = [loss, logits.logsumexp(-1), *torch.autograd.grad(loss, given)]
    for mine, other in zip(found, wanted, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(mine.double(), other.detach(), rtol=0.02, atol=0.01 * scale)


@pytest.mark.parametrize("classes", [200, 256])
def test_logits_near_the_largest_float(classes):
    graph = fg.Graph("large", io_dtype="bfloat16")
    x, w, target = graph.tensor("x", (128, 64)), graph.tensor("w", (classes, 64)), graph.tensor("t", (128,), "int32")
    graph.output(graph.linear_cross_entropy(x, w, target, reduction="none")[1], name="log_sums")
    rows, columns = np.zeros((128, 64), ml_dtypes.bfloat16), np.zeros((classes, 64), ml_dtypes.bfloat16)
    rows[:, 0], columns[:, 0] = np.where(np.arange(128) % 2, 1, -1), np.linspace(-3.2e38, 3e38, classes)
    found = graph.compile("cpu", target="h200")(x=rows, w=columns, t=np.zeros(128, np.int32))
    (log_sums,) = found.values() if isinstance(found, dict) else (found,)
    expected = np.where(np.arange(128) % 2, columns[:, 0].max(), -columns[:, 0].min()).astype(np.float64)
    np.testing.assert_allclose(np.asarray(log_sums, np.float64).ravel(), expected, rtol=1e-6)
