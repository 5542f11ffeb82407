"""torch.compile(backend="fusegraph") called with one choice of sizes, strides and numbers after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fusegraph.torch  # noqa: E402


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
