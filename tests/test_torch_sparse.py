"""torch's semi-structured sparse matrices, as CUTLASS's layout has them."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import quick

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.sparse import _semi_structured_conversions as conversions  # noqa: E402

import fusegraph.torch  # noqa: E402
from codegen.target import target  # noqa: E402
from fusegraph.frontends.torch.exported import import_module  # noqa: E402
from fusegraph.lowering.base import Options  # noqa: E402
from fusegraph.ops.base import Role  # noqa: E402
from fusegraph.plan import plan  # noqa: E402


def matrix(rows: int, terms: int, dtype: Any) -> Any:
    """Returns a random matrix with two of every four neighbours."""
    dense = torch.randn(rows, terms, generator=torch.Generator().manual_seed(rows))
    fours = dense.view(rows, -1, 4)
    kept = torch.zeros_like(fours).scatter(-1, torch.rand_like(fours).topk(2)[1], 1)
    return (fours * kept).view(rows, terms).to(dtype)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A product with a compressed matrix in each of the ways that torch writes it, or the first few."""

    def __init__(self, dense: Any, ways: int = 3) -> None:
        super().__init__()
        self.ways = ways
        packed, meta = conversions.sparse_semi_structured_from_dense_cutlass(dense)
        assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(packed, meta), dense)
        self.register_buffer("packed", packed)
        self.register_buffer("places", meta)

    def forward(self, x: Any, bias: Any) -> list[Any]:
        aten = torch.ops.aten
        ways = [
            aten._sparse_semi_structured_mm(self.packed, self.places, x.t()).t(),
            aten._sparse_semi_structured_addmm(bias, self.packed, self.places, x.t()).t(),
        ]
        if self.ways > 2 and hasattr(torch.sparse.semi_structured, "_ensure_cutlass_mm_registered"):
            few = self.packed.shape[0] - 5
            ways.append(torch.ops.semi_structured.cutlass_mm(x, self.packed, self.places, bias, few, 16, 16, True))
        return ways


@pytest.mark.slow
def test_products_are_sparse_on_hopper() -> None:
    dense, x = matrix(2048, 4096, torch.bfloat16), torch.randn(1024, 4096).to(torch.bfloat16)
    (graph,) = import_module(Layer(dense, ways=2), x, torch.randn(2048).to(torch.bfloat16)).graphs
    kernels = plan(graph, Options(target=target("h200"))).kernels
    assert [sum(n.op.role is Role.SPARSE_MATMUL for n in k.group.nodes) for k in kernels] == [1, 1]


@pytest.mark.parametrize("dtype", quick(torch.bfloat16, torch.float16), ids=str)
def test_products_are_understood(dtype: Any) -> None:
    if hasattr(torch.sparse.semi_structured, "_ensure_cutlass_mm_registered"):
        torch.sparse.semi_structured._ensure_cutlass_mm_registered()
    dense, x, bias = matrix(96, 128, dtype), torch.randn(24, 128).to(dtype), torch.randn(96).to(dtype)
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    with torch.no_grad():
        plain, added, *rest = torch.compile(Layer(dense), backend="fusegraph", fullgraph=True)(x, bias)
    (report,) = fusegraph.torch.report()
    assert report.left == ()
    wanted = x.double() @ dense.double().t()
    close = {"rtol": 0.02, "atol": 0.1}
    torch.testing.assert_close(plain.double(), wanted, **close)
    torch.testing.assert_close(added.double(), wanted + bias.double(), **close)
    for found in rest:
        torch.testing.assert_close(found.double(), (wanted + bias.double())[:, :91], **close)
