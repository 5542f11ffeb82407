"""What a backward pass takes from the forward pass: the minimum cut, the limit of memory, and what is told of both."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import compile_for

import fusegraph as fg
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan, plan
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.report.explain import describe, explain_text, traffic


def mlp(dtype: str = "bfloat16") -> fg.Graph:
    """A norm, two products with an activation between, and the gradients of a loss."""
    g = fg.Graph("mlp", io_dtype=dtype)
    x, scale, bias = g.tensor("x", (64, 32)), g.tensor("scale", (32,)), g.tensor("bias", (32,))
    w, v = g.tensor("w", (32, 128)), g.tensor("v", (128, 32))
    y = g.gelu_approx_tanh(g.layernorm(x, scale, bias) @ w) @ v + x
    loss = g.reduction(g.cast(y * y, "float32"), "avg")
    g.output(loss)
    for gradient in g.gradients(loss, [x, w, v, scale, bias]):
        g.output(gradient)
    return g


def block(dtype: str = "bfloat16") -> fg.Graph:
    """Two convolutions with batch norms, a residual, and the gradients."""
    g = fg.Graph("block", io_dtype=dtype)
    x = g.tensor("x", (2, 16, 8, 8), layout="channels_last")
    filters = [g.tensor(f"w{k}", (16, 16, 3, 3), layout="channels_last") for k in (1, 2)]
    scales, biases = ([g.tensor(f"{n}{k}", (1, 16, 1, 1), "float32") for k in (1, 2)] for n in ("scale", "bias"))
    h = g.relu(g.batchnorm(g.conv_fprop(x, filters[0], padding=1), scales[0], biases[0])[0], name="h")
    y = g.relu(g.batchnorm(g.conv_fprop(h, filters[1], padding=1), scales[1], biases[1])[0] + x)
    seed = g.tensor("seed", y.shape, layout="channels_last")
    g.output(y)
    for gradient in g.gradients(y, [x, *filters, *scales, *biases], seed):
        g.output(gradient)
    return g


def heads(dtype: str = "bfloat16") -> fg.Graph:
    """Attention between a product whose columns are queries, keys and values, and another; and the gradients."""
    g = fg.Graph("heads", io_dtype=dtype)
    x, w, v = g.tensor("x", (2, 16, 32)), g.tensor("w", (32, 96)), g.tensor("v", (32, 32))
    parts = (g.transpose(g.reshape(p, (2, 16, 2, 16)), (0, 2, 1, 3)) for p in g.split(x @ w, 3, 2))
    found = g.sdpa(*parts, use_causal_mask=True)
    y = g.reshape(g.transpose(found, (0, 2, 1, 3)), (2, 16, 32)) @ v
    seed = g.tensor("seed", y.shape)
    g.output(y)
    for gradient in g.gradients(y, [x, w, v], seed):
        g.output(gradient)
    return g


def kept(made: Plan) -> dict[str, int]:
    return {s.name: s.nbytes for s in made.saved}


def test_a_norm_is_computed_again_from_its_operand() -> None:
    """Its backward pass reads x and the statistics, not the normalized rows in float32."""
    made = plan(mlp())
    saved = kept(made)
    assert "layernorm mean" in saved
    assert not [name for name in saved if "normal" in name]
    rows = [k for k in made.kernels if any(t.name == "d x" for t in k.group.writes)]
    assert "x" in {t.name for t in rows[0].group.reads}


def test_a_batch_norm_and_its_relu_are_computed_again() -> None:
    made = plan(block())
    largest = [name for name, nbytes in kept(made).items() if nbytes >= 2 * 16 * 64 * 2]
    assert sorted(largest) == ["conv_fprop", "h"]  # the operand of a norm, and that of a filter's gradient
    assert len(made.kernels) == 9


def test_attention_and_its_gradients_need_no_copies() -> None:
    """Results lie with their heads beside each other; gradients are written where the product's operand has them."""
    made = plan(heads())
    assert "pointwise" not in {kernel.group.family for kernel in made.kernels}
    assert len(made.kernels) == 10


def test_a_norm_deep_in_a_residual_network_reads_one_sum() -> None:
    """Not all products that were added up to it, though these are kept by none but the sums."""
    g = fg.Graph("deep", io_dtype="bfloat16")
    x, scale = g.tensor("x", (2048, 64)), g.tensor("scale", (64,))
    weights = [g.tensor(f"w{k}", (64, 64)) for k in range(5)]
    y = x
    for w in weights:
        y = y + g.rmsnorm(y, scale) @ w
    loss = g.reduction(g.cast(g.rmsnorm(y, scale), "float32"), "avg")
    for gradient in g.gradients(loss, weights):
        g.output(gradient)
    made = plan(g)
    assert not [name for name in kept(made) if "normal" in name or "matmul" in name]
    assert max(sum(t.size == x.size for t in k.group.reads) for k in made.kernels) <= 3


def test_graphs_without_gradients_keep_nothing() -> None:
    g = fg.Graph("forward")
    g.output(g.gelu(g.tensor("x", (8, 8)) @ g.tensor("w", (8, 8))))
    assert plan(g).saved == ()


def test_a_limit_of_memory_trades_bytes_moved() -> None:
    """The operand of a filter's gradient is made again, by a kernel of the backward pass."""
    free, tight = plan(block()), plan(block(), Options(memory=6000))
    assert "h" in kept(free)
    assert "h" not in kept(tight)
    assert sum(kept(tight).values()) < sum(kept(free).values())
    assert traffic(tight) >= traffic(free)
    kernels = [{n.name for n in kernel.group.nodes} for kernel in tight.kernels]
    (again,) = (k for k, nodes in enumerate(kernels) if "h again" in nodes)
    assert again > max(k for k, nodes in enumerate(kernels) if any(name.startswith("conv_fprop") for name in nodes))


def test_explain_says_what_is_kept_and_why() -> None:
    facts = describe(plan(block()))
    by_name = {s["name"]: s for s in facts["saved"]}
    assert by_name["h"]["reason"] == "conv_wgrad takes it from memory"
    assert by_name["conv_fprop"]["reason"] == "conv_fprop is not computed again"
    assert by_name["h"]["bytes"] == 2 * 16 * 64 * 2
    for number in by_name["h"]["kernels"]:
        assert "h" in {t["name"] for t in facts["kernels"][number - 1]["reads"]}
    text = explain_text(facts)
    assert "kept for the backward pass, 8.3 kB:" in text
    assert "h 4.1 kB, read by kernel" in text


@pytest.mark.parametrize("build", [mlp, block, heads])
@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.slow
def test_what_is_computed_again_is_the_same(build, memory) -> None:
    """Bounds of errors say little of long gradients: in float32 they are as near to float64 as float32 is."""
    result = check_executable(CpuExecutable(build(), Options(memory=memory)))
    assert result.ok, result
    graph = build("float32")
    arrays = random_inputs(graph, 0)
    found = graph.compile("cpu", memory_limit=memory)(**arrays)
    for mine, wanted in zip(found, graph.compile("reference")(**arrays), strict=True):
        assert np.abs(mine - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_compile_takes_the_limit() -> None:
    g = block()
    run = g.compile("cpu", memory_limit=6000)
    assert "h" not in kept(run.plan)
    with pytest.raises(fg.FusegraphError, match="memory_limit"):
        g.compile("cpu", memory_limit=-1)


def test_weights_may_be_updated_in_the_same_graph() -> None:
    """What is computed again reads a bias before its update, in whatever order the kernels run."""
    g = fg.Graph("step", io_dtype="float32")
    x, w, b = g.tensor("x", (16, 8)), g.tensor("w", (8, 8)), g.tensor("b", (8,))
    h = g.gelu(x @ w + b)
    loss = g.reduction(g.softplus(h @ w + b) * h, "add", keepdims=False)
    g.output(loss)
    for t, d in zip((w, b), g.gradients(loss, [w, b])):
        g.assign(t, t - d * 0.1)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(t.shape).astype(np.float32) for t in (x, w, b)]
    wanted = [np.array(a) for a in arrays]
    g.compile("reference")(*wanted)
    g.compile("cpu")(*arrays)
    for mine, other in zip(arrays, wanted):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [mlp, block, heads])
@pytest.mark.parametrize("memory_limit", [None, 0])
def test_what_is_computed_again_is_the_same_on_a_gpu(build, memory_limit) -> None:
    result = check_executable(build().compile("cuda", memory_limit=memory_limit))
    assert result.ok, result


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_of_a_backward_pass_compile_without_spills(arch: str) -> None:
    compiled = compile_for(arch, [mlp(), block(), heads()])
    assert [k.name for k in compiled if k.spill_bytes] == []


def test_kernels_do_not_wait_for_each_other() -> None:
    """One kernel updates a scale and makes what another needs, which would compute something of the old scale again."""
    g = fg.Graph("waiting", io_dtype="float32")
    x, s = g.tensor("x", (64, 32)), g.tensor("s", (32,))
    first = g.reduction(g.tanh(x * s), "max", axes=1)
    second = g.softplus(x * s) * g.reduction(g.sigmoid(x * s + first), "max", axes=1)
    loss = g.reduction(second, "add", keepdims=False)
    g.output(loss)
    dx, ds = g.gradients(loss, [x, s])
    new = g.assign(s, s - ds * 0.1)
    g.output(g.tanh(x * s) * dx + new)
    result = check_executable(CpuExecutable(g, Options()))
    assert result.ok, result
