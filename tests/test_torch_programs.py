"""torch.compile(backend="fusegraph") on what programs do beside computing: views and inputs written to, random numbers,
branches, sizes that change, mistakes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import fusegraph.torch  # noqa: E402
from benchmarks import torch_models as models  # noqa: E402
from fusegraph.errors import ArgumentError  # noqa: E402

functional = torch.nn.functional
#: Options with which random numbers are those of eager mode.
EAGER = {"fallback_random": True}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fusegraph.torch.report(clear=True)


def _compiled(function: Any, **how: Any) -> Any:
    return torch.compile(function, backend="fusegraph", **how)


def _left() -> set[str]:
    return {op for report in fusegraph.torch.report() for _, op, _ in report.left}


def _views(x: Any) -> Any:
    part = x[:, 1:3]
    part.mul_(2)
    x.t()[0].add_(1)
    return x.sum(1), part, x[2]


def _parts(x: Any) -> Any:
    x[1:].copy_(x[:-1].relu())
    return x * 2, x.view(-1)[::5]


def _detached(x: Any) -> Any:
    y = x.relu().detach()
    y[y > 1] = 0.5
    return y, x.add_(y)


@pytest.mark.slow
@pytest.mark.parametrize("function", [_views, _parts, _detached])
def test_writes_through_views_reach_the_input(function: Callable[[Any], Any]) -> None:
    """And results that are views of an input are views of it still."""
    x = torch.randn(4, 6)
    other = x.clone()
    with torch.no_grad():
        got, wanted = _compiled(function, fullgraph=True)(x), function(other)
    torch.testing.assert_close(x, other)
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
        shared = theirs.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        assert (ours.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == shared


@pytest.mark.slow
def test_inputs_that_overlap_are_one_memory() -> None:
    def function(x: Any, y: Any) -> Any:
        x.add_(1)
        return y * 2

    base = torch.randn(10)
    other = base.clone()
    with torch.no_grad():
        got = _compiled(function)(base[:6], base[2:8])
        wanted = function(other[:6], other[2:8])
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(base, other)


@pytest.mark.slow
def test_random_numbers_may_be_torchs() -> None:
    def function(x: Any) -> Any:
        edges = functional.dropout(x, 0.0), functional.dropout(x, 1.0), functional.dropout(x, 0.3, training=False)
        return x.relu() + torch.rand_like(x) * torch.randn(7), *edges

    x = torch.randn(5, 7)
    torch.manual_seed(1)
    got = _compiled(function, fullgraph=True, options=EAGER)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(got, function(x))


@pytest.mark.slow
def test_random_numbers_are_drawn_in_the_order_of_the_program() -> None:
    """Also those that depend on what is computed, and those of branches."""

    def function(x: Any) -> Any:
        flips = torch.bernoulli(torch.sigmoid(x)) + torch.rand_like(x)
        drawn = torch.cond(x.sum() > 1e9, lambda a: a + torch.rand(7), lambda a: a + torch.randn(7), (x.relu(),))
        return flips, torch.randperm(5), torch.multinomial(x.softmax(-1), 2), drawn, torch.rand(2)

    x = torch.randn(5, 7)
    with torch.no_grad():
        torch.manual_seed(1)
        got = _compiled(function, options=EAGER)(x)
        torch.manual_seed(1)
        torch.testing.assert_close(got, function(x))


@pytest.mark.slow
def test_dropout_may_be_eagers_however_the_tensor_lies() -> None:
    """The mask is drawn in the order of memory; and when a checkpoint computes it again, it is the same."""

    def function(x: Any, y: Any) -> Any:
        parts = x, x.t(), x.t()[:, ::2], x[:1].expand(6, 8), x.bfloat16(), y
        return [functional.dropout(part, 0.4) for part in parts], functional.dropout2d(y, 0.5)

    def recomputed(x: Any) -> Any:
        return checkpoint(lambda x: functional.dropout(x.exp(), 0.5), x, use_reentrant=False)

    inputs = torch.randn(6, 8), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    torch.manual_seed(1)
    got = _compiled(function, options=EAGER)(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(got, function(*inputs))
    x = torch.zeros(64, requires_grad=True)
    kept = _compiled(recomputed, options=EAGER)(x)
    kept.sum().backward()
    assert torch.equal(x.grad, kept.detach())


@pytest.mark.slow
def test_what_depends_on_no_input_is_torchs_tensor() -> None:
    """Where torch takes it, here for complex numbers."""

    def function(x: Any) -> Any:
        angles = torch.arange(20).reshape(5, 4) * 0.1
        turns = torch.polar(torch.ones(5, 4), angles)
        return torch.view_as_real(torch.view_as_complex(x) * turns).flatten(1) * 2

    x = torch.randn(5, 4, 2)
    torch.testing.assert_close(_compiled(function, fullgraph=True)(x), function(x))
    assert "aten.polar.default" in _left()


@pytest.mark.slow
def test_layers_of_transformers_are_written_out() -> None:
    """What torch's modules compute with one operator when nothing is to be learnt."""
    dim, heads = 16, 4
    make = torch.nn.TransformerEncoderLayer
    layers = [
        make(dim, heads, 24, activation=act, batch_first=True, norm_first=first).eval()
        for act, first in (("gelu", True), ("relu", False))
    ]
    attention = torch.nn.MultiheadAttention(dim, heads, batch_first=True).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)

    def function(x: Any, padding: Any, causal: Any) -> Any:
        pre, post = layers
        return (
            post(pre(x, src_key_padding_mask=padding)),
            pre(x, src_mask=causal),
            post(x, src_mask=causal > 0, src_key_padding_mask=padding),
            *attention(x, x, x, attn_mask=causal > 0),
            *attention(x, x, x, key_padding_mask=padding, average_attn_weights=False),
            attention(x, x, x, need_weights=False)[0],
        )

    x, padding = torch.randn(2, 5, dim), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = torch.ones(5, 5).triu(1)
    with torch.no_grad():
        got, wanted = _compiled(function)(x, padding, causal), function(x, padding, causal)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert not _left()


@pytest.mark.slow
def test_normalisation_whose_statistics_are_kept_learns() -> None:
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.BatchNorm2d(4, affine=False)]
    model = torch.nn.Sequential(*layers)
    model[1:].eval()
    eager = copy.deepcopy(model)
    x = torch.randn(2, 3, 6, 6)
    for module in (_compiled(model), eager):
        module(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    assert not _left()


@pytest.mark.slow
def test_branches_and_sizes_that_depend_on_data() -> None:
    def function(x: Any) -> Any:
        y = x.relu() + 1
        if y.sum() > 30:
            y = y * 2
        return y[y > 1].exp().sum()

    compiled = _compiled(function)
    with torch.no_grad():
        for x in (torch.full((4, 5), 3.0), torch.full((4, 5), 0.1)):
            torch.testing.assert_close(compiled(x), function(x))
    assert len(fusegraph.torch.report()) > 1


@pytest.mark.slow
def test_symbolic_sizes() -> None:
    """Of batches and of images; kernels are compiled once for all."""
    layers = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 4)).eval()
    compiled = _compiled(model, dynamic=True)
    with torch.no_grad():
        for batch, size in ((2, 8), (3, 8), (2, 11), (3, 8)):
            x = torch.randn(batch, 3, size, size)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(fusegraph.torch.report()) == 1, "kernels for all of them"
    assert not _left()


@pytest.mark.slow
def test_a_network_learns_as_in_float64() -> None:
    """A step of a residual network with batch statistics: gradients and running statistics, channels last."""
    model = models.ResNet((1, 1), 8, 10).to(memory_format=torch.channels_last)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    target = torch.tensor([1, 9, 0, 3])
    for module, images in ((_compiled(model), x), (eager, x), (exact, x.double())):
        functional.cross_entropy(module(images), target).backward()
    largest = max(p.grad.abs().max() for p in exact.parameters())
    for ours, theirs, true in zip(model.parameters(), eager.parameters(), exact.parameters()):
        assert ours.grad.stride() == theirs.grad.stride()
        allowed = 2 * (theirs.grad - true.grad).abs().max() + 2.0**-20 * largest
        assert (ours.grad - true.grad).abs().max() <= allowed
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    assert [r.name for r in fusegraph.torch.report()] == ["forward", "backward"]
    assert not _left(), "running statistics are written where they lie"


WRONG = {
    "leave": ["aten.exp.default", ["aten.no_such_operator.default"], ["aten.exp"], [3]],
    "workspace_limit": [-1, "1 MB"],
}


@pytest.mark.parametrize("option", WRONG)
def test_values_that_an_option_cannot_have(option: str) -> None:
    x = torch.ones(3)
    for value in WRONG[option]:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=option) as caught:
            _compiled(lambda x: x.exp() + 1, options={option: value})(x)
        assert isinstance(caught.value.inner_exception, ArgumentError)
        assert repr(value) in str(caught.value)
        assert "Traceback" not in str(caught.value)


def test_numbers_in_tensors_of_the_program() -> None:
    """A model that writes ``mask[a:b] = 3`` has tensors of rank 0 on the CPU: they are numbers, on whatever device."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from fusegraph.frontends.torch.backend import compile_program
    from fusegraph.frontends.torch.cut import Analysis
    from fusegraph.frontends.torch.forms import forms_of

    aten = torch.ops.aten

    def program(x: Any) -> Any:
        y = aten.copy.default(x[1:], aten.lift_fresh_copy.default(torch.tensor(3)))
        z = aten.where.self(x[1:] > 0, y, aten.lift_fresh_copy.default(torch.tensor(0.5)))
        return y + 1, z, aten.copy.default(x, x[0].to(torch.int32))

    x = torch.randn(4, 5)
    graph = make_fx(program, tracing_mode="fake")(x).graph
    with FakeTensorMode():  # as while torch traces
        forms = forms_of(graph, {})
    assert {str(n.target) for n in forms.numbers} == {"aten.lift_fresh_copy.default"}
    assert set(forms.numbers.values()) == {3, 0.5}
    results = compile_program(Analysis(graph, forms), "inference", {}, {})([x])
    for got, expected in zip(results, program(x)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_numbers_computed_of_tensors_of_the_program() -> None:
    """A model that divides by ``torch.sqrt(torch.tensor(48.0))`` divides by a number, rounded as torch rounds it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fusegraph.frontends.torch.backend import compile_program
    from fusegraph.frontends.torch.cut import Analysis
    from fusegraph.frontends.torch.forms import forms_of

    aten = torch.ops.aten

    def program(x: Any) -> Any:
        scale = aten._to_copy.default(
            aten.sqrt.default(aten.lift_fresh_copy.default(torch.tensor(48.0))), dtype=x.dtype
        )
        returned = aten.lift_fresh_copy.default(torch.tensor(2.0)) * 3
        return x / scale, x * returned, returned

    x = torch.randn(4, 5, dtype=torch.bfloat16)
    graph = make_fx(program, tracing_mode="fake")(x).graph
    numbers = forms_of(graph, {}).numbers
    expected = torch.tensor(48.0).sqrt().to(torch.bfloat16).item()
    assert {str(n.target): value for n, value in numbers.items() if "copy" not in n.name} == {
        "aten.sqrt.default": torch.tensor(48.0).sqrt().item(),
        "aten.mul.Tensor": 6.0,
    }
    assert expected in numbers.values()
    run = compile_program(Analysis(graph, forms_of(graph, {})), "inference", {}, {})
    for _ in range(2):
        results = run([x])
        for got, wanted in zip(results, program(x)):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        results[2].zero_()  # a result is the caller's to write to


def test_numbers_that_are_returned_are_tensors() -> None:
    def program(x: Any) -> Any:
        return x * 2, torch.tensor(16), torch.tensor(0.5)

    x, compiled = torch.randn(3), torch.compile(program, backend="fusegraph")
    for got, expected in zip(compiled(x), program(x), strict=True):
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
