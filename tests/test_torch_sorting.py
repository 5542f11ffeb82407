"""Sorting behind torch.compile, on the cpu engine, against eager torch: dtypes, NaN, ties, empty tensors, gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fusegraph.torch  # noqa: E402

DTYPES = ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"]
#: Dtypes whose code differs most; the others are left to the slow tier.
QUICK = {"float32", "bfloat16", "int64", "bool"}


def compiled(function: Any, *inputs: Any) -> Any:
    """Compiles and runs a function; asserts that fusegraph took all of it."""
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    result = torch.compile(function, backend="fusegraph")(*inputs)
    assert not [what for report in fusegraph.torch.report() for what in report.left]
    return result


def check(function: Any, *inputs: Any) -> None:
    for got, wanted in zip(compiled(function, *inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def some(dtype: str, *shape: int) -> Any:
    """Returns a tensor of few different values, so many are equal; floats include NaN, infinities and signed zeros."""
    torch.manual_seed(sum(shape))
    kind = getattr(torch, dtype)
    values = [0.0, 1, 2, 3, 4] if not kind.is_floating_point else [-0.0, 0, 1, -2, torch.nan, torch.inf, -torch.inf]
    return torch.tensor(values)[torch.randint(len(values), shape)].to(kind)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [d if d in QUICK else pytest.param(d, marks=pytest.mark.slow) for d in DTYPES])
def test_every_dtype(dtype: str) -> None:
    """What torch's result is defined to be: all of a stable sort, the values of what is taken of equal ones."""

    def every(x: Any, row: Any) -> tuple[Any, ...]:
        both = (*x.sort(dim=1, stable=True), *x.sort(dim=0, descending=True, stable=True))
        if x.dtype == torch.bool:  # torch has nothing but sort of it
            return both
        sequence, first = row.sort().values, x.topk(3, 1)
        found = torch.searchsorted(sequence, x), torch.searchsorted(sequence, x, right=True)
        return (*both, first.values, x.gather(1, first.indices), x.kthvalue(2, 1).values, x.median(1).values, *found)

    row = some(dtype, 9).nan_to_num(2) if dtype.startswith(("float", "bfloat")) else some(dtype, 9)
    check(every, some(dtype, 5, 40), row)


def test_dimensions_of_nothing_and_of_one() -> None:
    def every(x: Any, empty: Any, scalar: Any) -> tuple[Any, ...]:
        return (
            *(*scalar.sort(), *scalar.topk(1), *scalar.kthvalue(1), *scalar.median(0), scalar.median()),
            *(*empty.sort(0), *empty.sort(1), *empty.topk(0), *x.topk(0), *x[:, :1].sort()),
            *(torch.searchsorted(empty[0], x), torch.searchsorted(x[0], empty[0]), torch.bucketize(scalar, x[0])),
        )

    check(every, torch.tensor([[3.0, 1, 2]]).sort().values, torch.zeros(4, 0), torch.tensor(5.0))


def test_strides_and_long_rows() -> None:
    """Rows that are not neighbours, and those that are sorted in several steps."""
    x = torch.randperm(3 * 5000).reshape(5000, 3).float()

    def every(x: Any) -> tuple[Any, ...]:
        return (*x.t().sort(), *x.sort(0, descending=True), *x.topk(5, 0), *x[::2, 1].sort(), *x.median(0))

    check(every, x)


def test_fused_with_what_surrounds_it() -> None:
    def scores(x: Any) -> tuple[Any, ...]:
        values, index = (x.abs() * 2).topk(4)
        return values.softmax(-1), index + 1

    x = torch.randn(8, 50)
    for got, wanted in zip(compiled(scores, x), scores(x)):
        torch.testing.assert_close(got, wanted)
    (report,) = fusegraph.torch.report()
    assert len(report.pieces) == 1


def test_gradients() -> None:
    """They go where the elements come from."""

    def total(x: Any) -> Any:
        weights = torch.arange(1.0, 13)
        return (x.sort(-1).values * weights).sum() + (x.topk(3, 0).values ** 2).sum() + x.median(1).values.sum()

    x, y = (torch.randn(6, 12, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    torch._dynamo.reset()
    torch.compile(total, backend="fusegraph")(x).backward()
    total(y).backward()
    torch.testing.assert_close(x.grad, y.grad)
