"""Training steps of torch.compile: what is kept for gradients, how it lies, and that the gradients are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fusegraph.torch  # noqa: E402
from fusegraph.layout import same_strides  # noqa: E402

nn = torch.nn
CHANNELS = 16


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fusegraph.torch.report(clear=True)


def _conv(inner: int = CHANNELS, outer: int = CHANNELS, **how: Any) -> Any:
    return nn.Conv2d(inner, outer, 3, padding=1, bias=False, **how)


class Features(nn.Module):  # type: ignore[misc, name-defined]
    """Returns an image that the gradient reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = _conv(3), _conv(), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Any) -> Any:
        features = self.norm(self.first(x)).relu()
        return self.second(features), features


class Tokens(nn.Module):  # type: ignore[misc, name-defined]
    """Reads an image as rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.mix = nn.Conv2d(3, 32, 4, stride=4), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return tokens + self.mix(self.norm(tokens)).sigmoid()


class Dense(nn.Module):  # type: ignore[misc, name-defined]
    """Normalizes what it concatenates, without parameters or running statistics; changes its result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _conv(3), _conv(CHANNELS, CHANNELS, groups=CHANNELS)
        self.norm = nn.BatchNorm2d(2 * CHANNELS, affine=False, track_running_stats=False)
        self.last = nn.Conv2d(2 * CHANNELS, 8, 1)

    def forward(self, x: Any) -> Any:
        first = self.first(x)
        joined = nn.functional.silu(self.norm(torch.cat([first, self.second(first)], 1)), inplace=True)
        return nn.functional.max_pool2d(self.last(joined), 2).mean((2, 3))


MODELS = {
    "layers": lambda: nn.Sequential(
        *(_conv(3), nn.BatchNorm2d(CHANNELS), nn.ReLU6()),
        *(_conv(stride=2), nn.BatchNorm2d(CHANNELS), nn.Hardswish(), nn.MaxPool2d(2), nn.GELU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 5)),
    ),
    "evaluated": lambda: nn.Sequential(_conv(3), nn.BatchNorm2d(CHANNELS), nn.Hardswish(), _conv()).eval(),
    "features": Features,
    "tokens": Tokens,
    "dense": Dense,
}


def _step(model: Any, x: Any) -> tuple[list[Any], Any]:
    """Returns results, gradients and buffers of a step, and what was kept for it."""
    given = x.clone().requires_grad_()
    results = model(given)
    results = results if isinstance(results, tuple) else (results,)
    kept = [
        t
        for t in (results[0].grad_fn.saved_tensors if hasattr(results[0].grad_fn, "saved_tensors") else ())
        if t is not None
    ]
    sum((y * y.detach().cos()).sum() for y in results).backward()
    return [*results, given.grad, *(p.grad for p in model.parameters()), *model.buffers()], kept


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_a_step_is_right_however_what_it_keeps_lies(name: str, layout: str) -> None:
    model = MODELS[name]()
    exact = copy.deepcopy(model).double()
    x = torch.randn(4, 3, 20, 24).to(memory_format=getattr(torch, layout))
    eager, _ = _step(copy.deepcopy(model), x)
    got, kept = _step(torch.compile(model, backend="fusegraph", fullgraph=True), x)
    wanted, _ = _step(exact, x.double())
    for ours, theirs, right in zip(got, eager, wanted, strict=True):
        assert same_strides(ours.shape, ours.stride(), theirs.stride())
        error = (theirs.double() - right).abs().max() + 1e-6 * right.abs().max()
        assert (ours.double() - right).abs().max() <= 8 * error
    assert not [r.left for r in fusegraph.torch.report() if r.left]
    images = [t for t in kept if t.dim() == 4 and t.is_floating_point() and t.shape[0] == 4 and t.shape[1] == CHANNELS]
    inside = [t for t in images if name != "features" or t.data_ptr() != got[1].data_ptr()]
    assert inside or name == "tokens"
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in inside)


def _kept(layers: Any, *shape: int) -> list[Any]:
    """Returns what a layer's gradient keeps beside its parameters and operand."""
    x = torch.randn(*shape, requires_grad=True)
    given = [x, *layers.parameters()]
    y = torch.compile(layers, backend="fusegraph", fullgraph=True)(x)
    saved = y.grad_fn.saved_tensors  # torch 2.11 frees them with the result
    return [t for t in saved if t is not None and all(t.data_ptr() != g.data_ptr() for g in given)]


class Gate(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        x = x.sin()
        return (x * (1 + torch.tanh(0.8 * x))).sigmoid()


def test_what_activations_return_is_not_kept_beside_their_operand() -> None:
    kept = _kept(nn.Sequential(nn.Linear(8, 8), Gate(), nn.Linear(8, 8)), 4, 8)
    assert sorted(tuple(t.shape) for t in kept) == [(4, 8), (4, 8)]  # a product's result, and the next one's operand


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.MaxPool2d(3, 2, 1), (2, 4, 13, 17)),
        (nn.MaxPool2d(2, dilation=2, padding=1, ceil_mode=True), (1, 2, 9, 500)),
    ],
)
def test_max_pooling_keeps_distances_in_a_window(pool: Any, shape: tuple[int, ...]) -> None:
    layers = nn.Sequential(nn.ReLU(), pool)
    kept = _kept(layers, *shape)
    narrow = torch.int16 if shape[-1] == 500 else torch.uint8
    assert [t.dtype for t in kept if t.dtype != torch.bool] == [narrow]  # beside relu's mask
    x = torch.randint(-2, 3, shape).float()  # many equal ones
    x[0, 0, 0] = torch.nan
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = torch.compile(layers, backend="fusegraph", fullgraph=True)(ours), layers(theirs)
    loss = torch.randn_like(y)
    y.backward(loss)
    expected.backward(loss)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


@pytest.mark.slow
def test_what_follows_from_what_is_kept_is_not_kept() -> None:
    """Batch norm's result and activations' masks follow from its operand."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (_conv(), nn.BatchNorm2d(CHANNELS), nn.Hardswish())))
    y = torch.compile(model, backend="fusegraph")(torch.randn(2, CHANNELS, 8, 8))
    images = [t for t in y.grad_fn.saved_tensors if t is not None and t.dim() == 4 and t.shape[2] == 8]
    assert len(images) == 6  # the operands of three convolutions and of three norms
    assert not any(t.dtype == torch.bool for t in y.grad_fn.saved_tensors if t is not None)


class Documents(nn.Module):  # type: ignore[misc, name-defined]
    """Attention in documents, whose tokens' positions begin at 0: a mask of positions, or of a few integers."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.qkv, self.given = nn.Linear(32, 96), given

    def forward(self, x: Any, starts: Any) -> Any:
        length = x.shape[1]
        row, key = torch.arange(length)[:, None], torch.arange(length)
        mask = key <= row
        if self.given:
            documents = (starts == 0).cumsum(-1)
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "dynamic"), [(False, False), (True, True)])
def test_masks_are_made_again(given: bool, dynamic: bool) -> None:
    layer, starts = Documents(given), torch.arange(24).expand(2, 24) % 9
    ours, theirs = (torch.randn(2, 24, 32, generator=torch.manual_seed(1)).requires_grad_() for _ in range(2))
    y = torch.compile(layer, backend="fusegraph", fullgraph=True, dynamic=dynamic)(ours, starts)
    kept = [t for t in y.grad_fn.saved_tensors if t is not None and not t.is_floating_point()]
    assert sum(t.numel() for t in kept) <= given * starts.numel()
    expected = layer(theirs, starts)
    loss = torch.randn_like(y)
    (grad,), (wanted,) = torch.autograd.grad(y, ours, loss), torch.autograd.grad(expected, theirs, loss)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.slow
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_masks_of_sizes_that_hang_on_data() -> None:
    def chosen(x: Any, lengths: Any) -> Any:
        found = torch.nonzero(lengths > 2).squeeze(1)
        return (x[found] * (torch.arange(x.shape[1]) < lengths[found][:, None])).exp().sum()

    ours, theirs = (torch.randn(10, 8, generator=torch.manual_seed(1)).requires_grad_() for _ in range(2))
    lengths = torch.arange(10)
    torch.compile(chosen, backend="fusegraph", fullgraph=True)(ours, lengths).backward()
    chosen(theirs, lengths).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
