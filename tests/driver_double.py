"""Running the driver layer against a double of the driver (libcuda_double.c).

A process loads one driver and keeps it, so such tests run in processes of their own: functions of a test module named
``double_*``, run by `run_double` with the double as libcuda.so.1.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fusegraph.runtime import driver

HERE = Path(__file__).parent
CAPTURING = 0x77  # the stream that the double says is being captured


def run_python(code: str, **environment: str) -> str:
    """Runs ``code`` in a new interpreter and returns its output, after checking that it succeeded without an error."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr == ""
    return result.stdout


@functools.cache
def double() -> str:
    """Compiles the double and returns its folder."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = Path(tempfile.mkdtemp(prefix="libcuda-double-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
    subprocess.run([*command, HERE / "libcuda_double.c", "-ldl", "-pthread"], check=True)
    return str(folder)


def run_double(module: str, *names: str) -> str:
    """Runs functions of a test module, one after the other, in a process whose driver is the double; returns its
    output.
    """
    calls = "; ".join(f"{module}.{name}()" for name in names)
    return run_python(f"import {module}; {calls}", LD_LIBRARY_PATH=double())


def library() -> Any:
    """Loads the double into this process and empties its log."""
    assert driver.available(), driver.unavailable_reason()
    lib = ctypes.CDLL("libcuda.so.1")
    lib.double_log.restype = ctypes.c_char_p
    lib.double_clear()
    return lib


def log(lib: Any) -> list[str]:
    return lib.double_log().decode().splitlines()


def streams_log(lib: Any) -> list[str]:
    return [line for line in log(lib) if line.split()[0] in ("event", "record", "wait", "sync")]


def raises(kind: type[Exception], *parts: str) -> Any:
    class Expect:
        def __enter__(self) -> None: ...

        def __exit__(self, seen: Any, error: Any, trace: Any) -> bool:
            assert seen is kind, (seen, error)
            assert all(part in str(error) for part in parts), str(error)
            return True

    return Expect()
