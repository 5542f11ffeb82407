"""torch.compile(backend="fusegraph") on a GPU: models at full size as eager, CUDA graphs, streams."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fusegraph.torch  # noqa: E402
from benchmarks.torch_models import MODELS, Model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
if not torch.cuda.is_available():
    pytestmark.append(pytest.mark.skip(reason="this torch has no CUDA, or there is no GPU"))

#: Of the largest result: what a result may be off beside twice what eager is; tf32 for convolutions in float32.
SLACK = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-10}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)


@pytest.mark.parametrize("dtype", SLACK, ids=["bfloat16", "float32"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_models_are_as_eager(model: Model, dtype: Any) -> None:
    module, x = model.module(dtype, "cuda"), model.input(dtype, "cuda")
    with torch.no_grad():
        got, eager = torch.compile(module, backend="fusegraph")(x), module(x)
        exact = copy.deepcopy(module).double()(x.double())
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    allowed = 2 * (eager.double() - exact).abs().max() + SLACK[dtype] * exact.abs().max()
    assert (got.double() - exact).abs().max() <= allowed


def test_calls_are_captured_in_cuda_graphs() -> None:
    model = MODELS[-1]
    module, x = model.module(torch.bfloat16, "cuda"), model.input(torch.bfloat16, "cuda")
    compiled = torch.compile(module, backend="fusegraph")
    with torch.no_grad():
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            compiled(x)
            on_other = compiled(x)
        other.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        fresh = torch.randn_like(x)
        x.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, compiled(fresh))
        assert not torch.equal(y, on_other)


@pytest.mark.parametrize("tf32", [False, True], ids=["strict", "tf32"])
def test_a_training_step_runs(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    torch.manual_seed(0)
    # Smooth: a relu's gradient jumps where tf32 moves a number over zero.
    layers = [torch.nn.Conv2d(3, 32, 3, 2, 1), torch.nn.BatchNorm2d(32), torch.nn.SiLU(), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32 * 16 * 16, 10)).cuda()
    x, target = torch.randn(8, 3, 32, 32, device="cuda"), torch.arange(8, device="cuda")
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    for module, images in ((torch.compile(model, backend="fusegraph"), x), (eager, x), (exact, x.double())):
        torch.nn.functional.cross_entropy(module(images), target).backward()
    # The bias in front of a batch norm has no gradient but rounding: errors are measured by the largest of all.
    largest = max(p.grad.abs().max() for p in exact.parameters())
    wrong = []
    for name, p in model.named_parameters():
        true = exact.get_parameter(name).grad
        ours, theirs = (float((g - true).abs().max() / largest) for g in (p.grad, eager.get_parameter(name).grad))
        if ours > 2 * theirs + (2.0**-8 if tf32 else 2.0**-18):
            wrong.append(f"{name}: off by {ours:.2g} of the largest gradient, eager by {theirs:.2g}")
    assert not wrong, wrong


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_attention(kernel: str, causal: bool) -> None:
    """The forward pass in training is torch's: it hands seeds to the gradient, which is ours."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    qkv = [torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    loss = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)

    def attended(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    grads = []
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        for function in (torch.compile(attended, backend="fusegraph"), attended):
            given = [x.clone().requires_grad_() for x in qkv]
            grads.append(torch.autograd.grad(function(*given), given, loss))
    with sdpa_kernel(SDPBackend.MATH):
        exact = [x.double().requires_grad_() for x in qkv]
        true = torch.autograd.grad(attended(*exact), exact, loss.double())
    for ours, theirs, right in zip(*grads, true):
        off, allowed = ((g - right).abs().max() for g in (ours, theirs))
        assert off <= 2 * allowed + 2.0**-8 * right.abs().max()
    left = {op: why for report in fusegraph.torch.report() for _, op, why in report.left}
    assert not any("attention_backward" in op for op in left), left


def test_a_step_needs_no_more_memory_than_eagers() -> None:
    """What the backward pass has read goes back while it runs; gradients lie there, and are right call after call."""
    layers = [m for _ in range(6) for m in (torch.nn.Linear(4096, 4096), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def peak(call: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):  # the last one replays what was recorded
            model.zero_grad()
            call(x).square().mean().backward()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())

    eagers = peak(model)
    expected = [p.grad for p in model.parameters()]
    with torch.cuda.stream(torch.cuda.Stream()):
        ours = peak(torch.compile(model, backend="fusegraph"))
    for p, wanted in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, wanted, rtol=0.05, atol=0.02 * float(wanted.abs().max()))
    assert ours - sum(g.nbytes for g in expected) <= 1.02 * eagers  # eager's gradients are still there


@pytest.mark.parametrize(("queries", "keys"), [(1, 2151), (3, 3), (49, 49), (16, 700)])
def test_few_queries_of_float32_have_a_kernel(queries: int, keys: int) -> None:
    """Those whose sums of exponentials are not asked for: torch's kernels compute the rest."""
    attended = torch.nn.functional.scaled_dot_product_attention
    shown = torch.rand((2, 1, queries, keys), device="cuda") < 0.7
    for shared, mask in ((6, None), (2, shown)):
        shapes = (2, 6, queries, 64), (2, shared, keys, 64), (2, shared, keys, 64)
        q, k, v = (torch.randn(shape, device="cuda") for shape in shapes)
        call = partial(attended, attn_mask=mask, enable_gqa=shared < 6)
        torch._dynamo.reset()
        with torch.no_grad():
            got = torch.compile(lambda *x, call=call: call(*x), backend="fusegraph")(q, k, v)
        exact = call(q.double(), k.double(), v.double())
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
    assert not any(function.left for function in fusegraph.torch.report())
