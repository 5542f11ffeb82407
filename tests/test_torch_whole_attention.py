"""Attention stays one operator on its way through AOTAutograd, whatever torch would make of the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import fusegraph.torch  # noqa: E402
from fusegraph.frontends.torch import backend, whole_attention  # noqa: E402

BATCH, HEADS, ROWS, KEYS, DEPTH = 2, 4, 5, 7, 8
sdpa = torch.nn.functional.scaled_dot_product_attention


def operands(kind: str, shared: int = HEADS) -> list[Any]:
    """Returns queries, keys and values as views of projections, and a mask of a kind if there is one."""
    torch.manual_seed(0)

    def rows(count: int, heads: int) -> Any:
        return torch.randn(BATCH, count, heads, DEPTH).transpose(1, 2)

    masks = {
        "": [],
        "some": [torch.rand(BATCH, 1, ROWS, KEYS) > 0.3],
        "of rows": [(torch.arange(ROWS) > 1)[:, None]],
        "of keys": [(torch.arange(KEYS) < 4).expand(BATCH, 1, 1, KEYS)],
        "added": [torch.randn(1, HEADS, ROWS, KEYS)],
        "turned": [torch.randn(KEYS, ROWS).t()],
    }
    if kind == "some":
        masks[kind][0][0, 0, 2] = False  # this query meets no key
    return [rows(ROWS, HEADS), rows(KEYS, shared), rows(KEYS, shared), *masks[kind]]


def compared(call: Callable[..., Any], given: list[Any], *, gradients: bool) -> Any:
    """Checks a call, and its gradients, against torch's in float64; returns the report."""
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    ours = [x.detach().requires_grad_(gradients and x.is_floating_point()) for x in given]
    theirs = [x.detach().double().requires_grad_(gradients) if x.is_floating_point() else x for x in given]
    result, wanted = torch.compile(call, backend="fusegraph", dynamic=False)(*ours), call(*theirs)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-4)
    if gradients:
        loss = torch.randn(wanted.shape)
        result.backward(loss)
        wanted.backward(loss.double())
        for mine, other in zip(ours, theirs, strict=True):
            if mine.requires_grad:
                torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
    return fusegraph.torch.report()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "gradients"),
    [
        ("", {}, False),
        ("", {"is_causal": True, "scale": 0.3}, True),
        ("some", {}, True),
        ("of rows", {}, False),
        ("of keys", {}, True),
        ("added", {}, False),
        ("added", {}, True),
    ],
)
def test_attention_stays_whole(kind: str, how: dict[str, Any], gradients: bool) -> None:
    reports = compared(partial(sdpa, **how), operands(kind), gradients=gradients)
    assert [r.left for r in reports] == [()] * len(reports)
    assert reports[0].kernels == 1  # as many heads as there are, no score in memory


@pytest.mark.parametrize("gradients", [False, True])
def test_shared_heads_are_not_repeated(gradients: bool) -> None:
    reports = compared(partial(sdpa, enable_gqa=True), operands("", shared=2), gradients=gradients)
    assert reports[0].kernels <= 1 + gradients  # the second one gives statistics another shape


def test_masks_that_lie_otherwise_in_memory_stay_whole() -> None:
    assert compared(sdpa, operands("turned"), gradients=False)[0].kernels == 1


def test_three_dimensions_are_heads_of_one_batch() -> None:
    assert compared(sdpa, [x[0] for x in operands("")], gradients=True)[0].kernels == 1


@pytest.mark.slow
def test_what_the_operator_does_not_take_goes_torchs_way() -> None:
    q, k, v = operands("")
    compared(sdpa, [q, k[:1], v[:1]], gradients=True)  # batches that broadcast
    compared(lambda *x: sdpa(*x).contiguous().view(-1, ROWS, DEPTH), [q, k, v], gradients=False)
    compared(lambda *x: sdpa(*x).view(BATCH * HEADS, ROWS, DEPTH), [x.contiguous() for x in (q, k, v)], gradients=False)


@pytest.mark.slow
def test_attention_inside_torchs_functions_stays_whole() -> None:
    """torch's tracer does not look into multi_head_attention_forward."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True)
    shown = (torch.arange(6) < 4).expand(6, 6)  # by a mask that none of torch's fused kernels takes
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    given = torch.randn(2, 6, 16, requires_grad=True)
    result = torch.compile(layer, backend="fusegraph")(given, src_mask=~shown)
    torch.testing.assert_close(result, layer(given, src_mask=~shown), rtol=1e-4, atol=1e-5)
    result.sum().backward()
    assert [r.left for r in fusegraph.torch.report()] == [(), ()]


def test_checkpointed_attention_stays_whole() -> None:
    def call(x: Any) -> Any:
        return checkpoint(lambda y: sdpa(y, y * 2, y + 1), x, use_reentrant=False)

    (given, *_) = operands("")
    assert [r.left for r in compared(call, [given], gradients=True)] == [(), ()]


def test_autocast_decides_on_the_dtype() -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return sdpa(q, k, v)

    given = operands("")
    torch._dynamo.reset()
    result = torch.compile(call, backend="fusegraph")(*given)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, call(*given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("queries", "keys", "learnt", "whole"),
    [
        (1, 3000, False, True),
        (16, 3000, False, True),
        (17, 3000, False, False),
        (60, 100, False, True),
        (1, 9, True, False),
    ],
)
def test_few_queries_of_float32_stay_whole_on_gpus(queries: int, keys: int, learnt: bool, whole: bool) -> None:
    """Fake tensors of a GPU: with heads that share keys, and a mask, torch computes products and a softmax."""
    mode = FakeTensorMode()

    def fake(*shape: int) -> Any:
        return FakeTensor(mode, torch.empty(shape, device="meta", requires_grad=learnt), torch.device("cuda:0"))

    q, k, v, mask = fake(2, 8, queries, 16), fake(2, 4, keys, 16), fake(2, 4, keys, 24), fake(2, 1, queries, keys)
    assert whole_attention._is_taken(q, k, v, mask, True) == whole


def test_an_option_leaves_attention_to_torch() -> None:
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    with torch.no_grad():
        torch.compile(sdpa, backend="fusegraph", options={"leave": [name]})(*operands(""))
    assert [op for r in fusegraph.torch.report() for _, op, _ in r.left] == [name]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shared"), [("", 2), ("some", 4), ("added", 4)])
def test_torch_can_compute_the_operator(kind: str, shared: int) -> None:
    q, k, v, *masks = (x.double() if x.is_floating_point() else x for x in operands(kind, shared))
    floats = [x.requires_grad_() for x in (q, k, v, *masks) if x.is_floating_point()]
    result, _ = whole_attention.attention(q, k, v, *(masks or [None]), not masks, 0.4)
    wanted = sdpa(q, k, v, *masks, is_causal=not masks, scale=0.4, enable_gqa=True)
    torch.testing.assert_close(result, wanted)
    loss = torch.randn_like(wanted)
    torch.testing.assert_close(torch.autograd.grad(result, floats, loss), torch.autograd.grad(wanted, floats, loss))
    mask = masks[0] if masks else None
    torch.library.opcheck(whole_attention.attention, (q, k, v, mask, not masks, 0.4))


@pytest.mark.slow
def test_attention_in_torchs_layers_stays_whole_in_training() -> None:
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 9, 32)
    seen = []
    original = backend._function

    def spy(module: Any, *args: Any, **how: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes)
        return original(module, *args, **how)

    with patch.object(backend, "_function", spy):
        y, _ = torch.compile(layer, backend="fusegraph")(x, x, x, need_weights=False)
        y.sum().backward()
    assert {"fusegraph.attention.default", "fusegraph.attention_backward.default"} <= {*seen}
