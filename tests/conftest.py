"""For all tests: a separate cache, GPU tests skipped with the reason where there is no GPU, fixtures."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

# Where Python writes no bytecode, all workers and all programs that tests start would compile all packages again, torch
# and sympy among them: half a minute each.  It is written to a folder of its own.
if sys.dont_write_bytecode and not os.path.exists(pytest.__cached__):
    sys.pycache_prefix = str(Path(__file__).parent.parent / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    del os.environ["PYTHONDONTWRITEBYTECODE"]

from hypothesis import Phase, settings

# Set before anything is imported: what the tests see is built from the sources as they are.  Workers of one run share
# it.
if "FUSEGRAPH_TEST_CACHE" not in os.environ:
    os.environ["FUSEGRAPH_TEST_CACHE"] = tempfile.mkdtemp(prefix="fusegraph-tests-")
os.environ["FUSEGRAPH_CACHE_DIR"] = os.environ["FUSEGRAPH_TEST_CACHE"]

# Workers share the processors: threads of their libraries would wait for each other, busily, most of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OPENBLAS", "OMP", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# The reference's arrays come and go by the gigabyte: glibc keeps their memory, up to 1 GB, which the system would
# otherwise take back and clear, page by page, for the next one; that takes longer than to compute them.
if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
    mallopt(-3, 1 << 28)  # M_MMAP_THRESHOLD: the bytes from which on an array is mapped by itself
    mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: the free bytes that are kept


# To shrink what fails may take minutes a test; the line that repeats it is printed anyway, and shrinks elsewhere.
if "CI" in os.environ:
    phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
    settings.register_profile("without shrinking", settings.get_profile("ci"), phases=phases)
    settings.load_profile("without shrinking")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Every other worker imports the tests from the last one on: workers then compile half of them each, and read what
    others compiled.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if int(worker.removeprefix("gw")) % 2 and all(map(os.path.isdir, session.config.args)):
        for path in sorted(Path(__file__).parent.glob("test_*.py"), reverse=True):
            with suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and says what is wrong
                import_module(path.stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from fusegraph.runtime import driver

    reason = driver.unavailable_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Freezes imported objects, and scans others less often: to scan all in every garbage collection takes a tenth of
    the time, torch's, which many tests import later, a twentieth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        import shutil

        shutil.rmtree(Path(os.environ["FUSEGRAPH_TEST_CACHE"]), ignore_errors=True)


@pytest.fixture
def contractions_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off split contractions, even those with few results, so that a test's kernel is the one it is meant for."""
    from graphs import leave_out_pass

    leave_out_pass(monkeypatch, "long contractions")


@pytest.fixture
def prologues_in_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves prologues in contractions' kernels where two kernels are estimated to take less."""
    from fusegraph.lowering import prologue

    monkeypatch.setattr(prologue, "confirmed", lambda view, options, choice, _: choice)


# ---- the command line


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a file of graphs and returns its path."""

    def write(text: str | bytes, name: str = "graphs.py") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder for what a command writes."""
    return tmp_path / "out"


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """Runs a command with --json: (status, object on stdout, stderr)."""
    from fusegraph.cli import main

    def tell(*arguments: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        status = main([*arguments, "--json"])
        stdout, stderr = capsys.readouterr()
        return status, json.loads(stdout, parse_constant=pytest.fail), stderr

    return tell


@pytest.fixture
def torch() -> Any:
    """PyTorch with CUDA."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch without CUDA")
    return module


@pytest.fixture
def tiled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves gradients of filters to tiled products, whatever would be faster."""
    from fusegraph.passes import filter_gradients

    monkeypatch.setattr(filter_gradients, "weighed", lambda *_: None)
