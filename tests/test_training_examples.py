"""The examples that train: a GPT with the builder alone, a ResNet of torch's."""

from __future__ import annotations

import importlib
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

from fusegraph.engines.cpu import CpuExecutable
from fusegraph.lowering.base import Options
from fusegraph.report.check import check_executable, random_inputs

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for package in ("safetensors", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("train_gpt")


def least(gpt: ModuleType, dtype: str = "bfloat16"):
    return gpt.Size(1, 16, 1, 8, batch=2, steps=4, rate=1e-2, dtype=dtype)


def test_text_is_plain() -> None:
    text = (FOLDER / "shakespeare.txt").read_bytes()
    assert 1e6 < len(text) < 1.1e6
    assert set(text) <= {ord("\n"), *range(32, 127)}


def test_parameters_are_those_of_gpt2(gpt: ModuleType) -> None:
    assert gpt.SIZES["gpt2"].parameters() == pytest.approx(124e6, rel=0.01)
    assert gpt.SIZES["gpt2-xl"].parameters() == pytest.approx(1.55e9, rel=0.01)


def test_all_that_a_step_changes_is_state(gpt: ModuleType) -> None:
    """So it is the same call each time, which a GPU records and replays."""
    graph, _ = gpt.training_step(least(gpt), 100)
    assert {t.name for t in graph.inputs} - {t.name for t in graph.updates.values()} == {"text"}
    assert graph.made == []


def test_a_checkpoint_is_whole_or_the_one_before(gpt: ModuleType, tmp_path: Path, monkeypatch) -> None:
    training, path = gpt.Training.__new__(gpt.Training), tmp_path / "checkpoint.safetensors"
    training.size, training.on_gpu = least(gpt), False
    with pytest.raises(SystemExit, match="leave out --resume"):
        training.load(path)
    training.state = {"done": np.array(3), "norm": np.ones(16, ml_dtypes.bfloat16), "losses": np.ones(4, np.float32)}
    training.save(path)
    training.state = {name: 0 * array for name, array in training.state.items()}

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gpt.os, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            training.save(path)
    training.load(path)
    assert training.done == 3
    assert training.state["norm"].dtype == ml_dtypes.bfloat16
    assert (training.state["norm"] == 1).all()
    training.state["norm"][0] = 2  # may be written
    training.size = replace(training.size, rate=1.0)
    with pytest.raises(SystemExit, match=r"is of Size\(.*rate=0.01"):
        training.load(path)
    for content in (path.read_bytes()[:-1], b"begin"):
        path.write_bytes(content)
        with pytest.raises(SystemExit, match=r"cannot be read .*; leave out --resume"):
            training.load(path)


def test_a_run_becomes_longer(gpt: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its losses stay; the learning rate is that of all steps, which the user is told."""
    training, path = gpt.Training.__new__(gpt.Training), tmp_path / "checkpoint.safetensors"
    training.size, training.on_gpu = least(gpt), False
    training.state = {"done": np.array(3), "losses": np.arange(4, dtype=np.float32)}
    training.save(path)
    training.size = replace(training.size, steps=9)
    training.load(path)
    assert "from step 4 on the learning rate is that of 9 steps" in capsys.readouterr().out
    assert training.losses.tolist() == [0, 1, 2]
    assert training.state["losses"].shape == (9,)
    training.size = replace(training.size, steps=2)
    with pytest.raises(SystemExit, match="3 steps already: give --steps 3 or more"):
        training.load(path)


@pytest.mark.parametrize("steps", ["0", "-2"])
def test_runs_have_steps(gpt: ModuleType, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpt.main(["--steps", steps])
    assert f"--steps is at least 1, got {steps}" in capsys.readouterr().err


def test_interrupted_steps_are_completed_and_saved(gpt: ModuleType, tmp_path: Path) -> None:
    training, path = gpt.Training.__new__(gpt.Training), tmp_path / "checkpoint.safetensors"
    training.size, training.on_gpu = replace(least(gpt), steps=100), False
    training.state = {"done": np.array(0), "losses": np.ones(100, np.float32)}

    def step() -> None:
        if training.done == 2:
            signal.raise_signal(signal.SIGINT)
        training.state["done"] += 1

    training.step = step
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match="--resume goes on from step 3 of 100"):
        gpt.train(training, path)
    assert signal.getsignal(signal.SIGINT) is before
    training.state["done"][...] = 0
    training.load(path)
    assert training.done == 3


@pytest.mark.slow
def test_a_step_equals_the_reference(gpt: ModuleType) -> None:
    graph, _ = gpt.training_step(least(gpt, "float32"), 100)
    inputs = random_inputs(graph, 0)
    for name, array in inputs.items():
        if "moment" in name or array.ndim == 0:
            inputs[name] = np.abs(array)
    inputs["done"] = np.array(2)
    result = check_executable(CpuExecutable(graph, Options()), inputs)
    assert result.ok, result


@pytest.mark.slow
def test_goes_on_as_if_it_had_not_stopped(gpt: ModuleType, tmp_path: Path) -> None:
    text, path = gpt.TEXT.read_bytes()[:4000], tmp_path / "checkpoint.safetensors"
    whole = gpt.Training(least(gpt), text, "cpu")
    gpt.train(whole, path)
    assert len(whole.losses) == 4
    first = gpt.Training(least(gpt), text, "cpu")
    gpt.train(first, path, until=2)
    assert (first.losses == whole.losses[:2]).all()

    second = gpt.Training(least(gpt), text, "cpu")
    second.load(path)
    gpt.train(second, path)
    assert (second.losses == whole.losses).all()
    for name, array in whole.state.items():
        assert (second.state[name] == array).all(), name
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.slow
def test_samples(gpt: ModuleType) -> None:
    """The same text each time; what comes later does not change what is told before, and a low temperature sharpens."""
    size, text = least(gpt), gpt.TEXT.read_bytes()[:4000]
    training = gpt.Training(size, text, "cpu")
    for _ in range(3):
        training.step()
    assert training.sample(12) == training.sample(12)
    assert 0 < training.held_out_loss() < 7

    run = gpt.next_byte(size).compile("cpu")
    tokens = np.arange(40, 48, dtype=np.int32)[None]
    later = np.where(np.arange(8) > 3, 99, tokens).astype(np.int32)

    def told(tokens: np.ndarray, last: int, temperature: float) -> np.ndarray:
        heat = np.array(temperature, np.float32)
        return run(tokens=tokens, last=np.array(last), temperature=heat, **training.weights)[0]

    assert (told(tokens, 3, 1.0) == told(later, 3, 1.0)).all()
    assert not np.allclose(told(tokens, 5, 1.0), told(later, 5, 1.0), rtol=1e-3)
    assert told(tokens, 3, 1.0).sum() == pytest.approx(1, abs=1e-5)
    assert told(tokens, 3, 0.1).max() > told(tokens, 3, 1.0).max()


@pytest.mark.slow
def test_the_loss_of_the_tiny_gpt_falls(gpt: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpt.Training, "sample", lambda *_: "To be")  # tested above, at less expense
    gpt.main(["--steps", "8", "--engine", "cpu", "--folder", str(tmp_path)])
    losses = [float(x) for x in re.findall(r"step \d+  loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4
    assert losses[0] < 5.6
    assert losses[-1] < 4.8
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text() == "To be\n"


@pytest.mark.gpu
def test_a_gpt_on_a_gpu(gpt: ModuleType, tmp_path: Path) -> None:
    """In bfloat16, with masters; after a stop at the same losses."""
    size = replace(gpt.SIZES["small"], layers=2, batch=16, steps=60)
    text, path = gpt.TEXT.read_bytes(), tmp_path / "checkpoint.safetensors"
    whole, first = gpt.Training(size, text, "cuda"), gpt.Training(size, text, "cuda")
    gpt.train(whole, path)
    assert whole.losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert whole.losses[-10:].mean() < 3
    gpt.train(first, path, until=30)
    second = gpt.Training(size, text, "cuda")
    second.load(path)
    gpt.train(second, path)
    assert (second.losses == whole.losses).all()
    assert len(second.sample(20)) > 5


@pytest.mark.slow
def test_a_resnet_trains_as_in_eager_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(FOLDER)
    resnet = importlib.import_module("train_resnet")

    def network(_: str):
        resnet.torch.manual_seed(0)
        return resnet.small_resnet(8, blocks=1)

    monkeypatch.setattr(resnet, "network", network)
    resnet.main(["--engines", "eager,fusegraph", "--steps", "6", "--pixels", "8"])
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[3:]}
    eager, ours = ([float(x) for x in rows[name][2:4]] for name in ("eager", "fusegraph"))
    assert ours == pytest.approx(eager, abs=2e-3)
    assert ours[1] < ours[0]
    with pytest.raises(SystemExit):
        resnet.main(["--engines", "tensorflow"])
