"""What is installed is enough, and nothing else that is called codegen is taken for ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusegraph.errors import FusegraphError, InstallationError
from fusegraph.installation import codegen_folder

ROOT = Path(__file__).resolve().parents[1]
IMPORT = """
try:
    import fusegraph
except ImportError as error:
    print(type(error).__name__, error)
"""


def run(code: str, path: Sequence[Path], *options: str) -> str:
    """Runs a program that finds modules in these folders first, and returns its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-P", *options, "-c", code],
        env=environment, cwd=path[0], capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the packages that are installed, and nothing else of the tree."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for package in ("fusegraph", "codegen"):
        (folder / package).symlink_to(ROOT / package)
    return folder


@pytest.mark.slow
def test_two_packages_are_enough(installed: Path) -> None:
    code = "import sys; sys.modules['benchmarks'] = None; from fusegraph.cli import main; main(['bench', '--list'])"
    assert "sigmoid(a+b*c) 64Mi fp32" in run(code, [installed])


@pytest.mark.parametrize("fake", ["codegen.py", "codegen/__init__.py"])
def test_another_codegen_in_front(installed: Path, tmp_path: Path, fake: str) -> None:
    file = tmp_path / "front" / fake
    file.parent.mkdir(parents=True)
    file.write_text("raise SystemExit('is not to be run')\n")
    told = run(IMPORT, [tmp_path / "front", installed])
    found = file if fake == "codegen.py" else file.parent
    assert told.startswith("InstallationError fusegraph needs its own package codegen")
    assert f"Python finds another one: {found}" in told
    assert str(installed / "codegen") in told
    assert "take its folder off sys.path" in told


def test_another_codegen_that_is_imported_already(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "codegen.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import codegen; del sys.path[0]\n{IMPORT}"
    assert f"another one: {tmp_path / 'codegen.py'}" in run(code, [installed])


@pytest.mark.parametrize(
    ("files", "found"), [(["codegen/__init__.py"], "another one"), (["codegen.py"], "another one"), ([], "none")]
)
def test_ours_is_overwritten_or_missing(installed: Path, files: list[str], found: str) -> None:
    (installed / "codegen").unlink()
    for file in files:
        (installed / file).parent.mkdir(exist_ok=True)
        (installed / file).write_text("")
    told = run(IMPORT, [installed], "-S")  # nothing else that is installed
    assert f"Python finds {found}" in told
    assert "pip install --force-reinstall --no-deps fusegraph" in told


def test_here() -> None:
    assert codegen_folder() == str(ROOT / "codegen")
    assert issubclass(InstallationError, FusegraphError)
