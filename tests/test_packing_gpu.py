"""Packed copies of parameters on a real GPU: streams, recordings, constants, torch's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegraph as fg

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def layer() -> Any:
    """Returns an executable in whose packing there is a constant."""
    graph = fg.Graph("layer")
    x, w = graph.tensor("x", (64, 256)), graph.tensor("w", (1024, 256), parameter=True)
    scale = graph.constant(np.linspace(1, 2, 256, dtype=np.float32), "scale")
    graph.output(x + graph.reduction(w * scale, mode="max", axes=0, keepdims=False), name="y")
    return graph.compile("cuda")


def expected(torch: Any, x: Any, w: Any) -> Any:
    return x + (w * torch.linspace(1, 2, 256, device="cuda")).amax(0)


def recorded(torch: Any, call: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_changes_on_several_streams(torch: Any) -> None:
    executable = layer()
    x, w = torch.randn(64, 256, device="cuda"), torch.randn(1024, 256, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for k in range(9):
        stream = streams[k % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000)
            w.mul_(-1.5 if k % 2 else 1.1)
            y = executable(x, w)
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(y, expected(torch, x, w))
        for other in streams:  # what is up to date needs no stream to wait
            with torch.cuda.stream(other):
                z = executable(x, w)
            torch.cuda.current_stream().wait_stream(other)
            torch.testing.assert_close(z, y, rtol=0, atol=0)
        for _ in range(4):
            executable(x, w)


def test_recordings_read_copies_that_calls_renew(torch: Any) -> None:
    executable = layer()
    x, w = torch.randn(64, 256, device="cuda"), torch.randn(1024, 256, device="cuda")
    executable(x, w)
    graph, y = recorded(torch, lambda: executable(x, w))
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close(y, expected(torch, x, w))
        w.normal_()
        executable(x, w)
        graph.replay()
        torch.testing.assert_close(y, expected(torch, x, w))


def test_what_is_packed_in_a_recording_is_part_of_it(torch: Any) -> None:
    executable = layer()
    x, w = torch.randn(64, 256, device="cuda"), torch.randn(1024, 256, device="cuda")
    executable(x, torch.randn_like(w))  # so that it is loaded
    graph, y = recorded(torch, lambda: executable(x, w))
    for _ in range(2):
        w.normal_()
        graph.replay()
        torch.testing.assert_close(y, expected(torch, x, w))
    torch.testing.assert_close(executable(x, w), y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_models_follow_their_parameters(torch: Any, dtype: str) -> None:
    import fusegraph.torch  # noqa: F401

    torch._dynamo.reset()
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 48, 3, stride=2)
    )
    model = model.eval().to("cuda", getattr(torch, dtype), memory_format=torch.channels_last)
    model[1].running_var.uniform_(0.5, 2)
    compiled = torch.compile(model, backend="fusegraph", dynamic=False)
    x = torch.randn(4, 16, 29, 31, device="cuda", dtype=getattr(torch, dtype)).to(memory_format=torch.channels_last)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if dtype == "bfloat16" else {"rtol": 1e-3, "atol": 1e-3}

    def check() -> None:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), **tolerance)

    check()
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    check()
    model[0].weight.data = torch.randn_like(model[0].weight) / 12
    check()
    with torch.no_grad():
        graph, y = recorded(torch, lambda: compiled(x))
        for p in model.parameters():
            p.mul_(1.25)
    check()
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(y, model(x), **tolerance)
    torch._dynamo.reset()
