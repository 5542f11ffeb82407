"""torch.compile(backend="fusegraph") on models, small, on the cpu engine: as eager in values, strides and gradients."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fusegraph.torch  # noqa: E402
from benchmarks import torch_bench  # noqa: E402
from benchmarks import torch_models as models  # noqa: E402
from fusegraph.errors import FileError  # noqa: E402

EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
CHANNELS_LAST = torch.channels_last
#: The first blocks of MobileNetV3: with squeeze and excite or without, with hardswish or relu, with a residual or none.
_BLOCKS = ((3, 16, 16, False, False, 1), (5, 72, 24, True, True, 2))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fusegraph.torch.report(clear=True)


def _compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="fusegraph", **options)


def _as_eager(got: Any, eager: Any, exact: Any) -> None:
    """Checks that the error against float64 is at most eager's plus a few roundings of the dtype."""
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    scale = exact.abs().max().item()
    allowed = 2 * (eager.double() - exact).abs().max().item() + 8 * EPSILON[got.dtype] * scale
    assert (got.double() - exact).abs().max().item() <= allowed


def _left() -> set[str]:
    return {op for report in fusegraph.torch.report() for _, op, _ in report.left}


def _image(*shape: int) -> Any:
    return torch.randn(shape).to(memory_format=CHANNELS_LAST)


def _network(make: Callable[[], Any]) -> Any:
    made = make().eval().to(memory_format=CHANNELS_LAST)
    for layer in made.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
    return made


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "ResNet": (lambda: _network(lambda: models.ResNet((1, 1), 8, 10)), lambda: _image(2, 3, 32, 32)),
    "MobileNetV3": (lambda: _network(lambda: models.MobileNetV3(_BLOCKS, 32, 10)), lambda: _image(2, 3, 32, 32)),
    "ViT block": (lambda: models.vit_block(48, 3), lambda: torch.randn(2, 17, 48)),
    "GPT-2 block": (lambda: models.gpt2_block(48, 3), lambda: torch.randn(2, 17, 48)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_inference_is_as_eager(case: str, dtype: Any) -> None:
    make, inputs = CASES[case]
    model, x = make().to(dtype), inputs().to(dtype)
    with torch.no_grad():
        _as_eager(_compiled(model)(x), model(x), copy.deepcopy(model).double()(x.double()))
    assert not _left()


def _step(model: Any, x: Any) -> tuple[Any, list[Any]]:
    """Runs a forward and a backward pass; returns the result, and the gradients and buffers."""
    y = model(x)
    y.square().mean().backward()
    return y.detach(), [p.grad for p in model.parameters()] + [b for b in model.buffers() if b.is_floating_point()]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["convnet", "GPT-2 block"])
def test_a_training_step_is_as_eager(case: str) -> None:
    if case == "convnet":
        layers = [torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        model: Any = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(128, 5))
        x = torch.randn(4, 3, 16, 16)
    else:
        model, x = models.gpt2_block(48, 3), torch.randn(2, 17, 48)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    y, state = _step(_compiled(model), x)
    y_eager, state_eager = _step(eager, x)
    y_exact, state_exact = _step(exact, x.double())
    _as_eager(y, y_eager, y_exact)
    for got, wanted, right in zip(state, state_eager, state_exact):
        _as_eager(got, wanted, right)
    assert [r.name for r in fusegraph.torch.report()] == ["forward", "backward"]
    assert _left() <= {"aten.copy_.default"}


@pytest.mark.slow
def test_autocast_multiplies_in_bfloat16() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)), torch.randn(6, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, eager = _compiled(model)(x), model(x)
    with torch.no_grad():
        _as_eager(got, eager, copy.deepcopy(model).double()(x.double()))
    assert not _left()


@pytest.mark.slow
def test_another_batch_size_is_compiled_when_it_comes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    compiled = _compiled(model)
    with torch.no_grad():
        for batch in (3, 5, 6, 5):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(fusegraph.torch.report()) == 3, "one for each size"
    assert not _left()


@pytest.mark.slow
def test_what_is_fused_is_what_was_recorded() -> None:
    """The blocks of transformers, as benchmarks/torch_bench.py writes it for docs/torch.md."""
    folder = Path(__file__).parents[1] / "benchmarks" / "results" / "torch"
    told = json.loads((folder / "fusion.json").read_text())
    if torch.__version__.partition("+")[0] != told["torch"].partition("+")[0]:
        pytest.skip(f"recorded with torch {told['torch']}, which traces otherwise than {torch.__version__}")
    recorded = [row for row in told["rows"] if row["model"].endswith("block")]
    chosen = [model for model in models.MODELS if model.name.endswith("block")]
    assert list(torch_bench.fusion(chosen)) == recorded, "run python -m benchmarks.torch_bench --fusion"


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": 3}', '{"rows": [{"name": 1}]}', '{"rows": []}', "\xff", None])
def test_a_file_of_no_run_is_left_alone(text: str | None, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("fusegraph.bench.measure.environment", lambda: {"device": "a GPU", "commit": "abc"})
    path = tmp_path / "run.json"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text, "latin-1")
    assert torch_bench.main(["--json", str(path), "--only", "no such model"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"{path} is ")
    assert text is None or path.read_text("latin-1") == text


def test_rows_of_the_same_device_and_commit_are_kept(tmp_path: Path) -> None:
    here, path = {"device": "a GPU", "commit": "abc"}, tmp_path / "run.json"
    rows = [asdict(torch_bench.Row(models.MODELS[0].name, "bf16", "eager", 10.0))]
    path.write_text(json.dumps({**here, "rows": rows}))
    assert torch_bench.earlier(path, here) == rows
    assert torch_bench.earlier(path, {**here, "commit": "def"}) == []
    path.write_text(json.dumps({**here, "rows": [{**rows[0], "model": "another"}]}))
    with pytest.raises(FileError, match="has models that"):
        torch_bench.earlier(path, here)
