"""Random networks of torch.nn's modules (`torch_zoo`): all of them are planned, and those that are run are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from graphs import quick

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch_zoo import WIDTH, network  # noqa: E402

import fusegraph as fg  # noqa: E402
import fusegraph.torch  # noqa: E402
from codegen import target  # noqa: E402
from fusegraph.engines import compile as compile_graph  # noqa: E402
from fusegraph.frontends.torch import backend  # noqa: E402
from fusegraph.plan import by_cost_model, plan  # noqa: E402

ARCHS = ("sm_80", "sm_90a")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)


def _planned(graph: fg.Graph, **_: Any) -> Any:
    """Plans a graph for several architectures; runs it on the reference."""
    for arch in ARCHS:
        made = plan(graph, choose=by_cost_model(target(arch)))
    executable = compile_graph(graph, "reference")
    executable.plan = made
    return executable


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 12, 6))
def test_every_network_and_its_gradients_are_planned(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "compile_graph", _planned)
    for seed in range(first, first + 6):
        torch._dynamo.reset()
        model, x = network(seed)
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        model, x = model.to(dtype), x.to(dtype).requires_grad_()
        torch.compile(model, backend="fusegraph")(x).float().square().mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1005))
def test_networks_are_as_eager(seed: int) -> None:
    model, x = network(seed)
    exact = copy.deepcopy(model).double()(x.double())
    with torch.no_grad():
        got, eager = torch.compile(model, backend="fusegraph")(x), model(x)
    assert (got.shape, got.stride()) == (eager.shape, eager.stride())
    allowed = 4 * (eager.double() - exact).abs().max() + 2.0**-16 * exact.abs().max()
    assert (got.double() - exact).abs().max() <= allowed


class _Tokens(torch.nn.Module):  # type: ignore[misc]
    """Attention between the pixels of an image, before the norm of a residual."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.weights = weights
        self.attention, self.norm = torch.nn.MultiheadAttention(WIDTH, 4), torch.nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        b, c, h, w = x.shape
        t = x.view(b, c, h * w).permute(2, 0, 1)
        return self.norm(t + self.attention(t, t, t, need_weights=self.weights)[0])


@pytest.mark.parametrize("shape", quick((3, WIDTH, 5, 7), (2, WIDTH, 4, 4), (1, WIDTH, 1, 3)))
@pytest.mark.parametrize("weights", [False, True], ids=["fused", "weights"])
def test_pixels_as_tokens(shape: tuple[int, ...], weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries lie where rows are counted otherwise, which shows when views are placed."""
    dtype = torch.float32 if weights else torch.bfloat16
    monkeypatch.setattr(backend, "compile_graph", _planned)
    with torch.no_grad():
        torch.compile(_Tokens(weights).to(dtype).eval(), backend="fusegraph")(torch.randn(shape, dtype=dtype))
