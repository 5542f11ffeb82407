"""The suite of training: tasks, losses, what gradients are compared with, parts on the cpu engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from graphs import quick

pytest.importorskip("torch")

import torch
from torch import nn

from fusegraph.bench.torch_engines import OURS, difference
from fusegraph.bench.training import steps
from fusegraph.bench.training.steps import EVAL, MODES, PARTS, TRAIN, Gradients, subject, with_loss
from fusegraph.bench.workers import each
from fusegraph.bench.zoo import run
from fusegraph.bench.zoo.models import MODELS
from fusegraph.bench.zoo.run import Row, Task
from fusegraph.cli import main


def test_tasks() -> None:
    found = steps.tasks(bool, ["bf16"], [0], MODES, "cuda")
    assert len({task.name for task in found}) == len(found) == 2 * len(MODELS) + len(PARTS)
    assert {task.mode for task in found if task.model in PARTS} == {TRAIN}
    assert [task.model for task in found if task.single] == ["step:gpt2", "step:gpt2-1.5b"]
    assert "hf:gpt2 bf16 b8 eval" in {task.name for task in found}
    small = steps.tasks(bool, ["fp32"], [0, 64], [TRAIN], "cpu")
    assert len(small) == len({task.model for task in small}) < len(found)
    assert all(task.name.endswith("train cpu") for task in small)


class _Labelled(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return {"loss": None if labels is None else (self.layer(input_ids.float()) - labels).square().sum()}


def test_losses() -> None:
    tokens, images = torch.randint(0, 9, (3, 4)), torch.randn(5, 4)
    loss, given = with_loss("hf:m", _Labelled(), ["input_ids"], [tokens])
    assert given[1] is tokens
    assert loss(*given).shape == ()
    layer = nn.Linear(4, 7).to(torch.bfloat16)
    loss, given = with_loss("tv:m", layer, [""], [images.bfloat16()])
    assert (given[1].shape, given[1].dtype, loss(*given).dtype) == ((5,), torch.int64, torch.float32)
    torch.testing.assert_close(loss(*given), nn.functional.cross_entropy(layer(given[0]).float(), given[1]))
    loss, given = with_loss("hf:m", layer.double(), [""], [images.double()])
    assert (given[1].shape, loss(*given).dtype) == ((5, 7), torch.float64)
    torch.testing.assert_close(loss(*given), (layer(given[0]) - given[1]).square().mean())


class _Small(Gradients):
    """A product, and random numbers in the mode of training."""

    def made(self, *, exact: bool = False) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        torch.manual_seed(0)
        x, w, unused = torch.randn(8, 4), torch.randn(4, 3).requires_grad_(), torch.ones(2).requires_grad_()
        if exact:
            x, w = x.double(), w.detach().double().requires_grad_()

        def loss(x: Any, w: Any) -> Any:
            return nn.functional.dropout(x @ w, 0.5, training=self.task.mode == TRAIN).square().mean()

        return loss, [x, w], [w, unused]


def test_gradients_are_compared_with_float64_unless_they_are_random() -> None:
    assert _Small(Task("m", "fp32", 1, TRAIN, "cpu")).expected() is None
    made = _Small(Task("m", "fp32", 1, EVAL, "cpu"))
    what, right = made.expected() or ("", [])
    assert (what, [x.dtype for x in right]) == ("float64", [torch.float64] * 2)
    assert difference(right, made.step("eager")()) < 1e-6
    assert run.operations(made.step("eager")) == 2 * 2 * 8 * 4 * 3


def test_figures_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory counts from before the first call; what fails is told, and the figures before it stay."""
    order = []

    def fails(_: Any) -> Any:
        raise RuntimeError("no capture")

    def peaks(step: Any, other: int) -> tuple[float, float, float]:
        order.append(other)
        return len(step()), 3.0, 4.0

    monkeypatch.setattr(run, "wait", order.append)
    for name, value in {
        "other_bytes": lambda: 7, "peaks_mb": peaks, "median_us": lambda _: 9.0, "kernels_of_call": lambda _: [1, 2],
        "replay_us": fails,
    }.items():  # fmt: skip
        monkeypatch.setattr(run, name, value)
    made, figures = _Small(Task("m", "fp32", 1, EVAL, "cpu")), run.Figures()
    _, right = made.expected() or ("", [])
    found = run._measured(Task("m", "fp32", 1, EVAL), made, "eager", figures, right)
    assert found == {"flops": 384, "rate": run.present().published}
    assert order == ["cuda", 7]
    assert (figures.pool_mb, figures.peak_mb, figures.held_mb) == (2, 3.0, 4.0)
    assert (figures.call_us, figures.kernels, figures.replay_us) == (9.0, 2, None)
    assert figures.why == {"replay": "RuntimeError: no capture"}
    assert 0 < (figures.error or 0) < 1e-6


def test_differences() -> None:
    x, small = torch.tensor([100.0, -200.0]), torch.tensor([1e-5, 0.0])
    assert difference([x], [x]) == difference([torch.zeros(2), torch.ones(0)], [torch.zeros(2), torch.ones(0)]) == 0
    assert difference([x], [x + 2]) == pytest.approx(0.01)
    assert difference([x, small], [x, small * 2]) == pytest.approx(1e-5 / 0.2)
    assert difference([x], [x * float("nan")]) == float("inf")
    with pytest.raises(ValueError, match="shorter"):
        difference([x, x], [x])


def test_operations_that_are_used() -> None:
    row = Row("step:m", "bf16", 1, {OURS: run.Figures(call_us=10.0)}, flops=400, rate=100.0)
    assert (row.mfu(OURS), row.mfu("inductor")) == (0.4, None)
    row.dtype = "fp32"
    assert row.mfu(OURS) is None


def _measured(name: str, folder: Path, device: str = "cpu", dtype: str = "fp32") -> dict[str, Any]:
    """Returns what a row has of a task."""
    task = Task(name, dtype, 2, TRAIN, device, caches=str(folder / "caches"))
    ((_, found),) = each(_times, [task], 1, 3600.0)
    assert isinstance(found, dict), found
    return found


def _times(task: Task) -> dict[str, Any]:
    return run._times(subject, task)


@pytest.mark.parametrize("name", quick("head:gpt2-graph", "adamw-clipped:gpt2-graph"))
def test_parts_without_torch(name: str) -> None:
    made = subject(Task(name, "fp32", 2, TRAIN, "cpu"))
    _, right = made.expected() or ("", [])
    assert difference(right, run.results(made.step(OURS), made.calls)) < 1e-5
    halves = subject(Task(name, "bf16", 2, TRAIN, "cpu"))
    if made.calls > 1:  # there is no peer with master weights
        assert (halves.engines, halves.expected()) == ((OURS,), None)
        torch.testing.assert_close(right[0], halves.step(OURS)()[0].float(), rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head:gpt2", "step:gpt2", "hf:gpt2"])
def test_steps_on_the_cpu_engine(name: str, tmp_path: Path) -> None:
    if not name.startswith("head:"):
        pytest.importorskip("transformers")
    found = _measured(name, tmp_path)
    assert found["engines"].keys() == {"eager", OURS}
    assert set(found["left"]) <= {"fusegraph.seeds.default"}
    figures = found["engines"][OURS]
    assert (figures.why, figures.call_us) == ({}, None)
    assert figures.kernels
    if name == "hf:gpt2":  # dropout
        assert (found["expected"], figures.error) == ("", None)
    else:
        assert figures.error < 1e-4
    assert found["flops"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["head:gpt2", "adamw:gpt2-graph"])
def test_steps_are_measured(name: str, tmp_path: Path) -> None:
    found = _measured(name, tmp_path, "cuda")
    for figures in found["engines"].values():
        assert figures.why == {}
        assert figures.error < 1e-3
        assert all((figures.call_us, figures.replay_us, figures.kernels))
        assert 0 < figures.pool_mb <= figures.peak_mb <= figures.held_mb
    if name == "head:gpt2":
        assert found["flops"] > 6 * 2 * 1024 * 768 * 50257 * 0.99


def test_command(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegraph.cli.suites.find_spec", lambda name: None if name == "transformers" else name)
    monkeypatch.setattr("fusegraph.runtime.driver.unavailable_reason", lambda: "no driver; use engine='cpu'")
    command = ["bench", "--suite", "training", "--only", "gpt2|resnet18"]
    assert main([*command, "--list", "--dtypes", "amp", "--modes", "eval,train"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == ["tv:resnet18 amp b2 eval cpu", "head:gpt2 amp b2 train cpu"]
    assert "step:... are left out: transformers" in said.err
    for more, words in ((["--modes", "test"], "'test' is none of train, eval"), (["--kernels"], "no driver")):
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err
