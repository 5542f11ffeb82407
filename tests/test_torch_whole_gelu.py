"""GELU that models write out: which is one call, and that it and its gradient stay what they were."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from fusegraph.frontends.torch.whole_gelu import keep_gelu_whole  # noqa: E402

WRITTEN = {
    "new": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "methods": lambda x: x.mul(0.5).mul(x.pow(3).mul(0.044715).add(x).mul(math.sqrt(2 / math.pi)).tanh().add(1)),
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "halved last": lambda x: x * (torch.erf(x * 0.70710678) + 1) / 2,
}
OTHERS = {
    "of another cube": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.0447 * torch.pow(x, 3.0)))),
    "of a square": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 2.0)))),
    "twice as large": lambda x: x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "of two tensors": lambda x: x.flip(0) * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "less": lambda x: x * 0.5 * (1.0 - torch.erf(x / math.sqrt(2.0))),
}


def _calls(function, *inputs):
    """Returns the names of what a traced function calls once GELU is whole, and its result."""
    names = []

    def backend(module, _):
        keep_gelu_whole(module)
        names.extend(getattr(n.target, "__name__", n.target) for n in module.graph.nodes if n.op.startswith("call"))
        return module.forward

    torch._dynamo.reset()
    return names, torch.compile(function, backend=backend)(*inputs)


@pytest.mark.parametrize("name", WRITTEN)
def test_one_call(name):
    x = torch.linspace(-6, 6, 99, dtype=torch.float64)
    names, result = _calls(WRITTEN[name], x)
    assert names == ["gelu"]
    torch.testing.assert_close(result, WRITTEN[name](x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    x = torch.linspace(-6, 6, 99, dtype=torch.float64)
    names, result = _calls(OTHERS[name], x)
    assert "gelu" not in names
    torch.testing.assert_close(result, OTHERS[name](x))


def test_used_intermediates_stay():
    def function(x):
        inner = torch.erf(x / math.sqrt(2.0))
        return x * 0.5 * (1.0 + inner), inner

    names, (result, inner) = _calls(function, torch.ones(3))
    assert names == ["truediv", "erf", "gelu"]
    torch.testing.assert_close(result, torch.nn.functional.gelu(torch.ones(3)))
    torch.testing.assert_close(inner, torch.erf(torch.ones(3) / math.sqrt(2)))


def test_operands_that_change_stay():
    def function(x):
        x = x * 1
        inner = torch.erf(x / math.sqrt(2.0))
        x.add_(1)
        return x * 0.5 * (1.0 + inner)

    names, result = _calls(function, torch.ones(3))
    assert "gelu" not in names
    torch.testing.assert_close(result, function(torch.ones(3)))


def test_dtype_of_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        names, result = _calls(lambda x, w: WRITTEN["new"](x @ w), torch.ones(4, 4), torch.eye(4))
    assert result.dtype == torch.bfloat16
    assert "gelu" in names


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["new", "erf"])
def test_gradients(name, dtype):
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.to(getattr(torch, dtype)).requires_grad_()
    wide = x.detach().double().requires_grad_()
    torch._dynamo.reset()
    y = torch.compile(lambda x: WRITTEN[name](x) * 1.5, backend="fusegraph")(x)
    y.sum().backward()
    expected = WRITTEN[name](wide) * 1.5
    expected.sum().backward()
    close = {"rtol": 2**-8, "atol": 2**-12} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(y.detach().double(), expected.detach(), **close)
    torch.testing.assert_close(x.grad.double(), wide.grad, **close)


def test_long_expressions_take_no_longer():
    def function(x):
        for _ in range(200):
            x = x * x + x
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

    names, _ = _calls(function, torch.zeros(3))
    assert names.count("gelu") == 1
