"""Linear layers with cross entropy become one operator in graphs from torch's tracer, where only the loss uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fusegraph.torch  # noqa: E402
from fusegraph.frontends.torch import whole_heads  # noqa: E402

F = torch.nn.functional
BATCH, LENGTH, DEPTH, CLASSES = 2, 5, 8, 19
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(whole_heads, "LEAST_LOGITS_BYTES", 0)
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    yield
    torch._dynamo.reset()


def operands(dtype: Any = torch.float32) -> list[Any]:
    torch.manual_seed(1)
    target = torch.randint(0, CLASSES, (BATCH, LENGTH))
    target[0, 1] = target[1, 4] = -100
    return [torch.randn(s, dtype=dtype) for s in ((BATCH, LENGTH, DEPTH), (CLASSES, DEPTH), (CLASSES,))] + [target]


def traced(call: Call, given: list[Any], **options: Any) -> tuple[list[str], Any, list[Any]]:
    """Returns the operators that the traced graphs have, the loss and the gradients."""
    seen: list[str] = []
    compiled = fusegraph.frontends.torch.backend.compile_program

    def recorded(analysis: Any, *args: Any) -> Any:
        seen.extend(str(n.target) for n in analysis.graph.nodes if n.op == "call_function")
        return compiled(analysis, *args)

    ours = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusegraph.frontends.torch.backend, "compile_program", recorded)
        loss = torch.compile(call, backend="fusegraph", dynamic=False, options=options)(*ours)
        grads = torch.autograd.grad(loss, [x for x in ours if x.requires_grad], torch.ones_like(loss) * 2)
    return seen, loss, list(grads)


def check(call: Call, given: list[Any], *, whole: bool = True, tolerance: float = 1e-5) -> list[str]:
    """Checks the loss and the gradients against torch's in float64, and whether the operator was made."""
    seen, loss, grads = traced(call, given)
    assert ("fusegraph.linear_cross_entropy.default" in seen) == whole
    assert ("fusegraph.linear_cross_entropy_backward.default" in seen) == whole
    theirs = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given]
    wanted = call(*theirs)
    by = torch.autograd.grad(wanted, [x for x in theirs if x.requires_grad], torch.ones_like(wanted) * 2)
    torch.testing.assert_close(loss.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    for mine, other in zip(grads, by, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=tolerance)
    assert not whole or not any(r.left for r in fusegraph.torch.report())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, {"reduction": "none", "label_smoothing": 0.2}, {"reduction": "sum", "ignore_index": 3}],
    ids=["mean", "none", "sum"],
)
def test_losses(how: dict[str, Any]) -> None:
    def call(x: Any, w: Any, b: Any, target: Any) -> Any:
        target = target.clamp(min=0) if "ignore_index" in how else target
        return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), target.view(-1), **how)

    check(call, operands())


def test_losses_of_language_models() -> None:
    """Logits are converted, and the last of each sequence has no next token."""

    def call(x: Any, w: Any, _: Any, target: Any) -> Any:
        logits = F.linear(x, w).float()[..., :-1, :].contiguous()
        return F.cross_entropy(logits.view(-1, CLASSES), target[..., 1:].contiguous().view(-1)) + _.sum() * 0

    check(call, operands(torch.bfloat16), tolerance=0.05)


@pytest.mark.slow
def test_autocast_rounds_operands_where_the_layer_is() -> None:
    def call(x: Any, w: Any, b: Any, target: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(x, w, b)
        return F.cross_entropy(logits.float().reshape(-1, CLASSES), target.flatten())

    _, loss, _ = traced(call, operands())
    assert loss.dtype == torch.float32
    check(lambda *given: call(*given), operands(), tolerance=0.05)


def test_logits_that_something_else_uses_are_kept() -> None:
    def call(x: Any, w: Any, b: Any, target: Any) -> Any:
        logits = F.linear(x, w, b).view(-1, CLASSES)
        return F.cross_entropy(logits, target.view(-1)) + logits.mean()

    check(call, operands(), whole=False)


@pytest.mark.slow
def test_weights_and_shares_of_classes_are_left_to_what_is_written() -> None:
    def weighted(x: Any, w: Any, b: Any, target: Any) -> Any:
        return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), target.view(-1), weight=b.detach().abs())

    def shared(x: Any, w: Any, b: Any, target: Any) -> Any:
        shares = F.one_hot(target.view(-1).clamp(min=0), CLASSES).to(x.dtype)
        return F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), shares)

    for call in (weighted, shared):
        torch._dynamo.reset()
        check(call, operands(), whole=False)


def test_targets_that_are_all_ignored() -> None:
    """The mean is NaN, its gradients are 0."""
    *given, target = operands()
    call = lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), t.view(-1))  # noqa: E731
    seen, loss, grads = traced(call, [*given, torch.full_like(target, -100)])
    assert "fusegraph.linear_cross_entropy_backward.default" in seen
    assert loss.isnan()
    assert all((gradient == 0).all() for gradient in grads)


def test_frozen_layers_have_no_gradient() -> None:
    x, w, b, target = operands()
    x.requires_grad_()
    call = torch.compile(
        lambda x: F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), target.view(-1)),
        backend="fusegraph",
        dynamic=False,
    )
    call(x).backward()
    ours, x.grad = x.grad, None
    F.cross_entropy(F.linear(x, w, b).view(-1, CLASSES), target.view(-1)).backward()
    torch.testing.assert_close(ours, x.grad)
