"""Attention and its gradients by the names of torch's CUDA kernels, on the cpu engine: only the forms are torch's."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import quick

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import fusegraph.torch  # noqa: E402
from fusegraph.frontends.torch.exported import import_module  # noqa: E402

aten = torch.ops.aten
SCALE = {"scale": 0.4}


def with_kernels_of_cuda(q: Any, k: Any, v: Any, bias: Any, seed: Any) -> tuple[list[Any], list[Any]]:
    """Runs torch's three CUDA kernels; returns results and statistics, then the gradients of 3 * result + 1 by q, k and
    v.
    """
    lengths, causal = (None, None, q.shape[2], k.shape[2]), (0.0, True)
    forward = [
        aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, **SCALE)[:2],
        aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, **SCALE)[:2],
        aten._scaled_dot_product_flash_attention(q, k, v, *causal, **SCALE)[:2],
    ]
    a, b, c = ((out * 3 + 1, q, k, v) for out, _ in forward)
    wanted = [True, True, True, False]
    gradients = [
        aten._scaled_dot_product_efficient_attention_backward(*a, bias, *forward[0], seed, seed, 0.0, wanted, **SCALE)[
            :3
        ],
        aten._scaled_dot_product_cudnn_attention_backward(
            *b, *forward[1], seed, seed, bias, *lengths, 0.0, False, **SCALE
        ),
        aten._scaled_dot_product_flash_attention_backward(*c, *forward[2], *lengths, *causal, seed, seed, **SCALE),
    ]
    return forward, gradients


@pytest.mark.slow
def test_attention_as_kernels_of_cuda_return_it() -> None:
    torch.manual_seed(0)
    q, k, v, bias = (torch.randn(2, 3, *each) for each in ((5, 8), (7, 8), (7, 8), (5, 7)))
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    with torch.no_grad():
        compiled = torch.compile(with_kernels_of_cuda, backend="fusegraph")
        forward, gradients = compiled(q, k, v, bias, torch.zeros((), dtype=torch.int64))
    assert [op for report in fusegraph.torch.report() for op in report.left] == []
    masks: list[tuple[bool, Any]] = [(False, bias), (False, bias), (True, None)]
    for (out, stats), ours, (causal, mask) in zip(forward, gradients, masks, strict=True):
        how = {"attn_mask": mask, **SCALE}
        wanted, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **how)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(stats.reshape(2, 3, -1)[..., :5], sums)
        theirs = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            wanted * 3 + 1, q, k, v, wanted, sums, 0.0, causal, **how
        )
        torch.testing.assert_close(tuple(ours), tuple(theirs), rtol=3e-5, atol=3e-5)
    padded = forward[0][1]  # to a multiple of 32, with what makes probabilities of zero
    assert padded.shape == (2, 3, 32)
    assert (padded[..., 5:] == float("inf")).all()


class Attention(torch.nn.Module):
    """Attention with all that a training step keeps for the gradient."""

    def __init__(self, kernel: Any, *arguments: Any) -> None:
        super().__init__()
        self.kernel, self.arguments = kernel, arguments

    def forward(self, q: Any) -> Any:
        found = self.kernel(q, q, q, *self.arguments)
        return [x * 1 if x is found[0] else x for x in found if isinstance(x, torch.Tensor)]


KERNELS = {
    "efficient": (aten._scaled_dot_product_efficient_attention, None, True),
    "cudnn": (aten._scaled_dot_product_cudnn_attention, None, True),
    "flash": (aten._scaled_dot_product_flash_attention,),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_that_hands_seeds_to_its_gradient_is_torchs(kernel: str) -> None:
    """What follows is ours."""
    mode = FakeTensorMode()
    with mode:
        imported = import_module(Attention(*KERNELS[kernel]), mode.from_tensor(torch.randn(2, 3, 5, 8)))
    (left,) = imported.left.values()
    assert left[0] == f"aten._scaled_dot_product_{kernel}_attention.default"
    assert left[1].endswith(("is needed, which fusegraph does not compute", "has a dtype that fusegraph has not"))
    assert [node.op.name for graph in imported.graphs for node in graph.nodes] == ["mul"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *quick(torch.bfloat16, torch.float64)])
def test_rows_that_a_finite_mask_hides_whole(dtype: Any) -> None:
    """Scores of the least number are alike: such a row has the mean of the values, and no gradient is NaN."""

    def attended(q: Any, k: Any, v: Any, mask: Any, wanted: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) * wanted

    torch.manual_seed(0)
    torch._dynamo.reset()
    operands = [torch.randn(2, 2, n, 16, dtype=dtype) for n in (9, 70, 70)]
    shown = torch.rand(2, 1, 9, 70) < 0.5
    shown[1, :, 3:5] = False
    mask = torch.zeros(2, 1, 9, 70, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)
    wanted = shown.any(-1, keepdim=True).to(dtype)
    found = []
    for function in (torch.compile(attended, backend="fusegraph"), attended):
        q, k, v = (x.clone().requires_grad_() for x in operands)
        function(q, k, v, mask, wanted).square().sum().backward()
        with torch.no_grad():
            found.append([function(q, k, v, mask, torch.ones_like(wanted)), q.grad, k.grad, v.grad])
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {}
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, **tolerance)
