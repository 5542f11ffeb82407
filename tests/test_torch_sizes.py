"""torch.compile(backend="fusegraph") called with one choice of sizes, strides and numbers after another."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
from graphs import quick

torch = pytest.importorskip("torch", reason="torch is not installed")

import fusegraph.torch  # noqa: E402
from fusegraph.engines.sized import sources_of  # noqa: E402
from fusegraph.frontends.torch.exported import import_program  # noqa: E402
from fusegraph.frontends.torch.files import graphs_of  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fusegraph.torch.report(clear=True)


def _learnt(*shape: int) -> Any:
    return torch.randn(shape).requires_grad_()


def _regular(count: int, size: int = 4) -> Any:
    return torch.eye(size) * 3 + torch.randn(count, size, size) * 0.1


def _printed(x: Any) -> Any:
    torch.ops.aten._print("")
    return x * 2


def _asserted(x: Any) -> Any:
    torch._assert_async((x < 100).all())
    return x * 2


#: Functions, each with the arguments of several calls.
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "inverses": (lambda x: torch.linalg.inv(x) * 2, [(_regular(n),) for n in (2, 3)]),
    "gradients of inverses": (lambda x: torch.linalg.inv(x) * 2, [(_regular(n).requires_grad_(),) for n in (2, 3)]),
    "negative powers": (lambda x: torch.matrix_power(x, -4) + 1, [(_regular(n),) for n in (2, 3)]),
    "factors": (lambda x: torch.linalg.lu_factor(x)[0] + 1, [(_regular(n),) for n in (2, 3)]),
    "solutions": (
        lambda x, y: torch.linalg.tensorsolve(x, y) + 1,
        [(torch.randn(n, 4, 2, n // 2, 4), torch.randn(n, 4)) for n in (6, 8)],
    ),
    "inverses of tensors": (lambda x: torch.linalg.tensorinv(x, 1) + 1, [(_regular(1, n)[0],) for n in (4, 6)]),
    "effects": (_printed, [(torch.randn(n, 4),) for n in (3, 5)]),
    "assertions": (_asserted, [(torch.randn(n, 4),) for n in (3, 5)]),
    "strides of one shape": (
        lambda x: x * 2 + 1,
        [(torch.randn(4, 6),), *((torch.randn(4, 6 * n)[:, ::n],) for n in (2, 3)), (torch.randn(6, 4).t(),)],
    ),
    "numbers": (
        lambda x, a, n, b: (x * a + n) * 2 if b else x + a,
        [
            (torch.randn(3, 4), 0.5, 2, True),
            (torch.randn(4, 4), 0.7, 3, True),
            (torch.randn(5, 4), torch.inf, 4, False),
        ],
    ),
    "None, tuples and mappings": (
        lambda x, y, shape, by: x.reshape(shape) * by["a"] if y is None else x * y,
        [(torch.randn(n, 4), None, (2, n * 2), {"a": n / 2}) for n in (3, 5)] + [(torch.randn(2, 4), 2.0, None, None)],
    ),
    "sizes of results alone": (
        lambda x, y: torch.cat([x, x]) * y,
        [(_learnt(n, 4), _learnt(2 * n, 4)) for n in (3, 5, 7)],
    ),
    "empty ones": (lambda x: x.exp() * 2, [(_learnt(n, 4),) for n in (3, 0, 1)]),
}


def _marked(x: Any, **bounds: tuple[int, int]) -> Any:
    """Returns a tensor whose dimensions d0, d1 ... vary within bounds."""
    for name, (low, high) in bounds.items():
        torch._dynamo.mark_dynamic(x, int(name[1:]), min=low, max=high)
    return x


def _reasons() -> list[str]:
    return [report.by_size for report in fusegraph.torch.report()]


@pytest.mark.slow
@pytest.mark.parametrize("learns", quick(True, False))
def test_numbers_are_constants_until_they_change(learns: bool) -> None:
    class Scaled(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.small, self.weight = 0.25, torch.nn.Parameter(torch.ones(4))

        def forward(self, x: Any, factor: float) -> Any:
            return x * math.sqrt(2 / math.pi) * self.weight + factor * (x > self.small)

    model = Scaled().requires_grad_(learns)
    compiled = torch.compile(model, backend="fusegraph", dynamic=True)
    for number, (rows, factor) in enumerate(((3, 0.5), (5, 0.5), (4, 0.75), (7, 0.125))):
        x = _marked(torch.randn(rows, 4), d0=(2, 8))
        got, expected = compiled(x, factor), model(x, factor)
        torch.testing.assert_close(got, expected)
        if learns:
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), model.weight) for y in (got, expected)))
        forward = [report for report in fusegraph.torch.report() if report.name != "backward"]
        assert len(forward) == 1 + (number > 1), "it is compiled once, and once more when a number changes"
        assert not any(report.left for report in forward)


@pytest.mark.slow
def test_what_is_compiled_by_size_says_why() -> None:
    function = lambda x: torch.slice_scatter(x, x[::2] * 2, 0, step=2) + 1  # noqa: E731
    for dynamic in (True, None):
        torch._dynamo.reset()
        fusegraph.torch.report(clear=True)
        compiled = torch.compile(function, backend="fusegraph", dynamic=dynamic)
        for size in (4, 6, 7):
            x = torch.randn(size, 3)
            torch.testing.assert_close(compiled(x), function(x))
        reasons = _reasons()
        assert len(reasons) == 3
        if dynamic:
            assert all("slice_scatter" in why for why in reasons)
        else:
            assert (reasons[0], "dynamic=True" in reasons[1]) == ("", True)
        assert f"compiled by size: {reasons[-1]}" in str(fusegraph.torch.report())


@pytest.mark.slow
def test_pooled_sizes_are_traced_once() -> None:
    """Whatever their remainders, of which some releases of torch make guards."""
    function = lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1) + 1  # noqa: E731
    compiled = torch.compile(function, backend="fusegraph", dynamic=True)
    for height, width in ((16, 17), (17, 16), (19, 22)):
        x = _marked(torch.randn(2, 3, height, width), d2=(8, 32), d3=(8, 32))
        torch.testing.assert_close(compiled(x), function(x))
    assert _reasons() == [""]


@pytest.mark.slow
def test_interpolation_is_for_all_sizes() -> None:
    function = lambda x: torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear") + 1  # noqa: E731
    compiled = torch.compile(function, backend="fusegraph", dynamic=True)
    for size in (4, 6, 7):
        x = _marked(torch.randn(size - 2, 3, size, size + 1), d0=(2, 8), d2=(2, 8), d3=(2, 8))
        torch.testing.assert_close(compiled(x), function(x))
    assert _reasons() == [""]


class Two(torch.nn.Module):  # type: ignore[misc]
    """Results of two operands with sizes in common; where ``doubled``, of one of them repeated."""

    def __init__(self, doubled: bool) -> None:
        super().__init__()
        self.doubled, self.layer = doubled, torch.nn.Linear(8, 6)

    def forward(self, x: Any, y: Any) -> Any:
        found = self.layer(x).relu() @ y
        return torch.slice_scatter(found, found[::2] * 2, 0, step=2) if self.doubled else found


def _exported(doubled: bool) -> Any:
    rows, columns = torch.export.Dim("rows", min=4, max=40), torch.export.Dim("columns", min=2, max=16)
    shapes = {"x": {0: rows}, "y": {1: columns}}
    return torch.export.export(Two(doubled), (torch.randn(5, 8), torch.randn(6, 7)), dynamic_shapes=shapes)


@pytest.mark.slow
def test_open_sizes_of_exported_programs_are_dims(capsys: Any) -> None:
    made = import_program(_exported(doubled=False))
    (graph,) = made.graphs
    assert made.fixed == ""
    assert [{n: tuple(b) for n, b in sources_of(graph)[name][2].dims.items()} for name in ("rows", "columns")] == [
        {"rows": (4, 40)},
        {"columns": (2, 16)},
    ]
    executable = graph.compile("cpu")
    weights = {name: p.detach() for name, p in Two(doubled=False).named_parameters()}
    given = {t.name: weights.get(t.name) for t in graph.inputs}
    for rows, columns in ((4, 2), (5, 7), (40, 16), (33, 8)):
        x, y = torch.randn(rows, 8), torch.randn(6, columns)
        got = executable(**{**given, "x": x, "y": y})
        wanted = (
            x.double() @ weights["layer.weight"].double().t() + weights["layer.bias"].double()
        ).relu() @ y.double()
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    (fixed,) = graphs_of("program", _exported(doubled=True))
    assert [tuple(t.shape) for t in fixed.outputs] == [(5, 7)]
    assert "program: its sizes are those of the inputs that it was exported with: " in capsys.readouterr().err


def _perceptron() -> Any:
    nn = torch.nn
    return nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))


def _images() -> Any:
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


def _encoder() -> Any:
    return torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)


#: Networks, shapes of their inputs, and bounds of what varies.
LEARNING: dict[str, tuple[Callable[[], Any], list[tuple[int, ...]], dict[str, tuple[int, int]]]] = {
    "perceptron": (_perceptron, [(70, 24), (81, 24), (128, 24)], {"d0": (64, 200)}),
    "images": (
        _images, [(2, 3, 16, 17), (5, 3, 19, 12), (4, 3, 20, 20)], {"d0": (2, 5), "d2": (16, 20), "d3": (12, 20)},
    ),
    "encoder": (_encoder, [(4, 16, 32), (5, 21, 32), (8, 24, 32)], {"d0": (4, 8), "d1": (16, 24)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_networks_learn_at_all_sizes(name: str) -> None:
    make, shapes, bounds = LEARNING[name]
    model = make()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fusegraph", dynamic=True)
    for shape in shapes:
        x = torch.randn(shape)
        results = [module(given) for module, given in ((compiled, _marked(x.clone(), **bounds)), (eager, x))]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        for module, result in zip((model, eager), results):
            module.zero_grad()
            result.square().mean().backward()
        for ours, theirs in zip(model.parameters(), eager.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    assert [report.name for report in fusegraph.torch.report()] == ["forward", "backward"]
    assert all(not why or "more ranges than are planned ahead" in why for why in _reasons())
    assert not any(report.left for report in fusegraph.torch.report())


def _leaves(values: Any) -> list[Any]:
    return [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _gradients(results: Any, arguments: Any) -> list[Any]:
    wanted = [x for x in _leaves(arguments) if x.requires_grad]
    return list(torch.autograd.grad(sum(x.sin().sum() for x in _leaves(results)), wanted)) if wanted else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [*((name, None) for name in CALLS), *((name, True) for name in ("factors", "solutions", "effects", "numbers"))],
)
def test_calls_after_each_other(name: str, dynamic: bool | None) -> None:
    function, calls = CALLS[name]
    compiled = torch.compile(function, backend="fusegraph", dynamic=dynamic)
    for arguments in calls:
        got, wanted = compiled(*arguments), function(*arguments)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        gradients = (_gradients(results, arguments) for results in (got, wanted))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    left = {why for report in fusegraph.torch.report() for _, _, why in report.left}
    assert left <= {"not in the table"}, "everything is known of the others"


#: Functions of two inputs whose first dimensions vary, all of whose sizes are compiled in the first calls.
FOR_ALL_SIZES: dict[str, Callable[..., Any]] = {
    "neighbours": lambda x, y: x[1:] - x[:-1] * y.sum(),
    "from the end": lambda x, y: x[-2:] * y[-1] + x[-1],
    # The backward pass is told of both sizes by numbers, not by an input's shape.
    "joined": lambda x, y: torch.cat([x * 2, y.sin()]).sum(1),
    "mean": lambda x, y: x.mean() * y.mean(),  # only the results' sizes vary in the backward pass
    "shifted labels": lambda x, y: x[:-1].log_softmax(-1).flatten()[: y.shape[0]] * y[:, 0],
}


@pytest.mark.parametrize("name", FOR_ALL_SIZES)
def test_one_compilation_is_for_all_sizes(name: str) -> None:
    function = FOR_ALL_SIZES[name]
    compiled = torch.compile(function, backend="fusegraph", dynamic=True)
    for number, (n, m) in enumerate([(5, 3), (7, 4), (12, 9)]):
        inputs = [_marked(_learnt(size, 4), d0=(3, 12)) for size in (n, m)]
        for x in inputs:
            torch._dynamo.mark_static(x, 1)
        got, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(got, expected)
        gradients = [torch.autograd.grad(y.square().sum(), inputs) for y in (got, expected)]
        torch.testing.assert_close(*gradients)
        if number == 0:
            count = len(fusegraph.torch.report())
    assert len(fusegraph.torch.report()) == count == 2
    assert not any(_reasons())


@pytest.mark.slow
def test_sizes_that_may_divide_by_nothing_are_compiled_when_they_come() -> None:
    """torch writes the size of such a reshape as a quotient by another, which nothing says is not 0."""
    function = lambda x: torch.nn.functional.pad(x, (0, -x.shape[1] % 8)).reshape(x.shape[0], -1, 8).sum(1)  # noqa: E731
    compiled = torch.compile(function, backend="fusegraph", dynamic=True)
    for size in (3, 9, 16):
        x = torch.randn(2, size)
        torch.testing.assert_close(compiled(x), function(x))
    assert all("may divide by 0" in reason for reason in _reasons())


@pytest.mark.slow
def test_convolutions_whose_filters_vary_are_compiled() -> None:
    function = lambda x, w: torch.nn.functional.conv1d(x, w, padding=1, stride=2)  # noqa: E731
    compiled = torch.compile(function, backend="fusegraph")
    for length, taps in ((9, 3), (17, 2)):
        x, w = _marked(torch.randn(2, 3, length), d2=(8, 20)), _marked(torch.randn(4, 3, taps), d2=(2, 3))
        torch.testing.assert_close(compiled(x, w), function(x, w))


def test_sizes_of_what_has_no_inputs() -> None:
    compiled = torch.compile(lambda x: torch.ones(x.shape[0], 4) * 2, backend="fusegraph", dynamic=True)
    for size in (5, 7):
        torch.testing.assert_close(compiled(torch.randn(size)), torch.full((size, 4), 2.0))
    assert len(fusegraph.torch.report()) == 1
