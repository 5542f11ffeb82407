"""Results in the memory of an input, on a GPU: as in memory of their own, or refused by the name of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_in_place import graph_of

import fusegraph as fg
from fusegraph.errors import ArgumentError

torch = pytest.importorskip("torch", reason="torch is not installed")

Build = Callable[..., Any]
ROWS = (4096, 1000)


def _statistics(g: fg.Graph, x: fg.Tensor, *more: fg.Tensor) -> Any:
    y, _, _, mean, variance = g.batchnorm(x, *more)
    return y, mean, variance


_CHANNELS = ((1, 64, 1, 1),) * 4
#: What is computed, the shapes of its inputs, and which input lies where each result goes (None: nowhere).
CASES: dict[str, tuple[Build, tuple[tuple[int, ...], ...], tuple[int | None, ...]]] = {
    "relu": (lambda g, x: g.relu(x), (ROWS,), (0,)),
    "rows that begin anywhere": (lambda g, x, y: g.sigmoid(x) * y, ((4097, 1001),) * 2, (1,)),
    "turned": (lambda g, x, y: x + g.transpose(y), ((1000, 2000), (2000, 1000)), (0,)),
    "softmax": (lambda g, x: g.softmax(x), (ROWS,), (0,)),
    "norm of a residual": (
        lambda g, x, r, s, b: (g.layernorm(x + r, s, b), x * 2), (ROWS, ROWS, (1000,), (1000,)), (0, 1)
    ),
    "residual of a product": (lambda g, a, b, c: g.relu(a @ b + c), ((512, 256), (256, 384), (512, 384)), (2,)),
    "running statistics": (_statistics, ((32, 64, 14, 14), *_CHANNELS), (0, 3, 4)),
    "two kernels": (lambda g, a, b, c: g.softmax(a @ b) + c, ((512, 256), (256, 256), (512, 256)), (0,)),
}  # fmt: skip
#: Those that a kernel does not allow.
REFUSED: dict[str, tuple[Build, tuple[tuple[int, ...], ...], tuple[int | None, ...]]] = {
    "factor": (lambda g, a, b: a @ b, ((256, 256),) * 2, (0,)),
    "scan": (lambda g, x: g.cumsum(x), (ROWS,), (0,)),
    "backwards": (lambda g, x: x[:, ::-1] + 1, (ROWS,), (0,)),
}


def _arrays(graph: fg.Graph) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.rand(t.shape, generator=generator, device="cuda").to(getattr(torch, t.dtype.name)) for t in graph.inputs
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_in_place(case: str, dtype: str) -> None:
    build, shapes, places = CASES[case]
    graph = graph_of(build, *shapes, dtype=dtype)
    executable = graph.compile("cuda")
    arrays = _arrays(graph)
    wanted = executable(*arrays)
    for result, array in zip(wanted if isinstance(wanted, tuple) else (wanted,), places, strict=True):
        if array is not None and result.dtype != arrays[array].dtype:
            pytest.skip("the result has another dtype")
    out = tuple(arrays[k] if k is not None else torch.empty_like(w) for k, w in zip(places, _each(wanted)))
    executable(*arrays, out=out)
    for found, expected in zip(out, _each(wanted), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_allows(case: str) -> None:
    build, shapes, places = REFUSED[case]
    graph = graph_of(build, *shapes)
    arrays = _arrays(graph)
    (place,) = places
    assert place is not None
    with pytest.raises(ArgumentError, match="kernel"):
        graph.compile("cuda")(*arrays, out=arrays[place])


def _each(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)
