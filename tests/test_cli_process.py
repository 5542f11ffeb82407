"""The command line as a process of its own: its streams, and signals."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_cli import POINTWISE

ENTRY = [sys.executable, "-m", "fusegraph"]


@pytest.mark.slow
def test_stdout_is_json_whatever_the_file_prints(write, tmp_path):
    file = write("import os\nprint('noise')\nos.system('echo more noise')\n" + POINTWISE)
    command = [*ENTRY, "compile", file, "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["graphs"][0]["name"] == "fma"
    assert "more noise" in done.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away(write):
    read, end = os.pipe()
    os.close(read)
    done = subprocess.run([*ENTRY, "explain", write(POINTWISE)], stdout=end, stderr=subprocess.PIPE, text=True)
    os.close(end)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"], ["--target", "sm_1", "--json"]])
def test_no_room_for_the_result(options, write):
    with open("/dev/full", "w") as full:
        command = [*ENTRY, "explain", write(POINTWISE), *options]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "fusegraph: error: stdout cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c(write, tmp_path):
    ready = tmp_path / "ready"
    file = write(f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n")
    # A shell starts what runs in the background with SIGINT ignored.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*ENTRY, "explain", file], stderr=subprocess.PIPE, text=True, preexec_fn=listen) as process:
        for _ in range(1000):
            if ready.exists():
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == "fusegraph: interrupted\n"


@pytest.mark.slow
def test_start_up_does_not_wait_for_numpy():
    """``import fusegraph`` and ``--help`` load no NumPy or networkx; every public name is there when asked for."""
    code = """
import sys
import fusegraph, fusegraph.cli
heavy = {"numpy", "networkx", "ml_dtypes", "cuda"}
fusegraph.cli.main(["--help"])
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert set(fusegraph.__all__) <= set(dir(fusegraph))
for name in fusegraph.__all__:
    assert getattr(fusegraph, name).__class__ is not None
    assert name in vars(fusegraph)
assert fusegraph.float8_e4m3.name == "float8_e4m3" and fusegraph.errors.FusegraphError is fusegraph.FusegraphError
assert "numpy" in sys.modules
try:
    fusegraph.nothing
except AttributeError as error:
    assert str(error) == "module 'fusegraph' has no attribute 'nothing'"
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compile" in done.stdout


def test_a_network_is_planned_without_networkx():
    code = """
import sys
import fusegraph as fg
from fusegraph.plan import plan
g = fg.Graph("network", io_dtype="bfloat16")
x = g.tensor("x", (8, 256, 64))
y = g.rmsnorm(x + g.gelu(x @ g.tensor("w", (64, 64), parameter=True)), g.tensor("scale", (1, 1, 64), parameter=True))
y = g.softmax(y.transpose(0, 2, 1) @ x, axis=-1)
g.output(y, name="y")
assert plan(g).kernels
assert not {"networkx", "sympy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
