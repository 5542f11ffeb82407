"""Every example: found and right on the cpu engine, compiled for every architecture without spills, run as a script."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.report.check import check, check_executable
from fusegraph.runtime import nvrtc

FOLDER = Path(__file__).parent.parent / "examples"
#: Examples that need a package which the others do not.
NEEDS = {"from_cudnn": "cudnn"}
#: Those that `test_training_examples` and `test_generate` run.
TRAINING = {"checkpoints", "generate", "train_gpt", "train_resnet"}
FILES = sorted(
    f
    for f in FOLDER.glob("*.py")
    if f.stem not in TRAINING and (f.stem not in NEEDS or importlib.util.find_spec(NEEDS[f.stem]))
)


def graphs_of(file: Path) -> list[Graph]:
    return [value for value in runpy.run_path(str(file)).values() if isinstance(value, Graph)]


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def run_script(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs an example as its reader does, from any folder."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120)


@pytest.fixture(scope="module")
def executables() -> dict[str, list[CpuExecutable]]:
    found = {file.stem: [CpuExecutable(g, Options(), lazy=True) for g in graphs_of(file)] for file in FILES}
    build_together([e for several in found.values() for e in several])
    return found


def test_every_example_is_there() -> None:
    wanted = {"sigmoid_fma", "conv_bias_relu", "matmul_bias_gelu", "image_filter", "torch_style_conv2d", "onnx_model"}
    assert wanted <= {file.stem for file in FILES}


@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=[] if f.stem == "sigmoid_fma" else pytest.mark.slow, id=f.stem) for f in FILES]
)
def test_equals_the_reference(file: Path, executables: dict[str, list[CpuExecutable]]) -> None:
    assert executables[file.stem], f"{file.name} has no module-level graph"
    for executable in executables[file.stem]:
        result = check_executable(executable)
        assert result.ok, result
        assert all(output.undecided == 0 for output in result.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_without_spills(arch: str, executables: dict[str, list[CpuExecutable]]) -> None:
    plans = [e.plan for several in executables.values() for e in several]
    kernels = [kernel.source for plan in plans if plan is not None for kernel in plan.kernels]
    names: dict[str, int] = {}
    for compiled in nvrtc.compile_kernels(kernels, arch):
        assert compiled.cubin, compiled.name
        names[compiled.name] = compiled.spill_bytes
    assert len(names) == len(kernels)
    assert not any(names.values()), names


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_equals_the_reference_on_a_gpu(file: Path) -> None:
    for graph in graphs_of(file):
        result = check(graph, "cuda")
        assert result.ok, result


def kernels_of(executable: CpuExecutable) -> list[list[str]]:
    """Returns the names of the ops of each kernel, in order."""
    assert executable.plan is not None
    return [[node.op.name for node in kernel.group.nodes] for kernel in executable.plan.kernels]


def test_fusion_is_what_the_examples_say(executables: dict[str, list[CpuExecutable]]) -> None:
    assert kernels_of(executables["sigmoid_fma"][0]) == [["mul", "add", "sigmoid"]]
    assert kernels_of(executables["matmul_bias_gelu"][0]) == [["matmul", "add", "gelu"]]
    assert kernels_of(executables["conv_bias_relu"][0]) == [
        ["conv_fprop", "bias", "relu"],
        ["conv_fprop", "bias", "add", "relu"],
    ]
    assert len(kernels_of(executables["image_filter"][0])) == 3
    if "from_cudnn" in executables:
        assert kernels_of(executables["from_cudnn"][0]) == [
            ["identity", "mul", "add", "relu", "identity", "conv_fprop"]
        ]


@pytest.mark.parametrize(
    "name", ["sigmoid_fma", "conv_bias_relu", "matmul_bias_gelu", "fit_mlp", "torch_style_conv2d", "from_cudnn"]
)
@pytest.mark.slow
def test_runs_as_a_script(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "numpy"))
    done = run_script(FOLDER / f"{name}.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert {
        "sigmoid_fma": "__global__",
        "conv_bias_relu": "hidden -> conv2: not fused",
        "matmul_bias_gelu": "without fusion: 3 kernels",
        "fit_mlp": "step   599  loss 0.00",
        "torch_style_conv2d": "largest difference",
        "from_cudnn": "kernel scale_bias_relu_conv_kernel: identity, mul, add, relu, identity, conv_fprop",
    }[name] in done.stdout
    assert not list(tmp_path.iterdir())


def test_torch_style_refuses_an_absent_framework() -> None:
    with pytest.raises(SystemExit, match=r"'tensorflow' is not one of the frameworks installed here: .*numpy"):
        example("torch_style_conv2d")["main"](["tensorflow"])


# ---- image_filter


def read(file: Path) -> np.ndarray[Any, Any]:
    image = pytest.importorskip("PIL.Image")
    with image.open(file) as opened:
        return np.asarray(opened.convert("RGB")).astype(np.float64)


def expected_filter(picture: np.ndarray[Any, Any], amount: float = 1.5, ink: float = 3.0) -> np.ndarray[Any, Any]:
    """Computes the filter with SciPy; its blur and Sobel operator are written independently of the example."""
    ndimage = pytest.importorskip("scipy.ndimage")
    row = np.array([1, 4, 6, 4, 1]) / 16
    blurred = ndimage.convolve1d(ndimage.convolve1d(picture, row, 0, mode="constant"), row, 1, mode="constant")
    sharp = picture + amount * (picture - blurred)
    brightness = picture @ [0.299, 0.587, 0.114]
    slopes = [ndimage.sobel(brightness, axis, mode="constant") / 8 for axis in (0, 1)]
    edge = np.hypot(*slopes)
    paper = np.clip(1 - edge * ink / 255, 0, 1)
    return np.clip(np.rint(sharp * paper[..., None]), 0, 255)


def test_image_filter_on_a_photograph(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("skimage")
    module = example("image_filter")
    cat = Path(pytest.importorskip("skimage.data").__file__).parent / "chelsea.png"
    module["main"]([str(cat), str(tmp_path)])
    before, after = read(tmp_path / "before.png"), read(tmp_path / "after.png")
    assert before.shape == after.shape == (300, 451, 3)
    assert (before == read(cat)).all()

    expected = expected_filter(before)
    assert np.abs(after - expected).max() <= 1  # where the float32 sum and SciPy's round to different sides of a half
    assert (after != expected).mean() < 1e-3

    # What a person sees: more contrast between neighbours, darker at the edges, the same picture still.
    inner = np.s_[2:-2, 2:-2]
    assert np.abs(np.diff(after[inner], axis=0)).mean() > 1.5 * np.abs(np.diff(before[inner], axis=0)).mean()
    assert after[inner].mean() < before[inner].mean()
    assert np.corrcoef(after[inner].ravel(), before[inner].ravel())[0, 1] > 0.9


@pytest.mark.slow
def test_image_filter_without_arguments(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    pytest.importorskip("PIL")
    done = run_script(FOLDER / "image_filter.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "fusegraph_out" / "image_filter"
    assert sorted(file.name for file in folder.iterdir()) == ["after.png", "before.png"]
    assert (read(folder / "before.png") != read(folder / "after.png")).mean() > 0.5


def test_image_filter_on_a_jpeg_of_odd_size(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rows, columns = np.mgrid[:37, :23]
    picture = np.stack([rows * 6, columns * 10, (rows + columns) % 256], axis=-1).astype(np.uint8)
    image.fromarray(picture).save(tmp_path / "photo.jpg")
    example("image_filter")["main"]([str(tmp_path / "photo.jpg"), str(tmp_path / "out")])
    before, after = read(tmp_path / "out" / "before.png"), read(tmp_path / "out" / "after.png")
    assert before.shape == after.shape == (37, 23, 3)
    assert np.abs(after - expected_filter(before)).max() <= 1


def test_image_filter_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("image_filter")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        with pytest.raises(SystemExit, match="Pillow, which is missing: pip install pillow"):
            module["main"]([])
    pytest.importorskip("PIL")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "skimage", None)
        with pytest.raises(SystemExit, match="pip install scikit-image"):
            module["main"]([])
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(SystemExit, match=r"text\.png cannot be read as a picture"):
        module["main"]([str(tmp_path / "text.png")])
    with pytest.raises(SystemExit, match=r"absent\.jpg cannot be read as a picture"):
        module["main"]([str(tmp_path / "absent.jpg")])
