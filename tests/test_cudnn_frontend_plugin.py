"""The plugin that runs cudnn-frontend's tests: what it says of tests that are right, wrong, refused and too large."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cudnn")
pytest.importorskip("torch")

HERE = Path(__file__).parent


@pytest.mark.slow
def test_what_is_reported(tmp_path):
    file = tmp_path / "test_user.py"
    shutil.copy(HERE / "cudnn_user.py", file)
    counts = tmp_path / "counts.json"
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["-p", "tests.cudnn_frontend_plugin", f"--rootdir={tmp_path}", str(file)]
    command += ["--fusegraph-operations", "1e6", "--fusegraph-json", str(counts)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(HERE.parent)
    done = subprocess.run(
        command, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = re.findall(r"^(PASSED|FAILED) \S*::(\w+)", done.stdout, re.MULTILINE)
    expected = {
        "test_matmul": "PASSED",
        "test_addresses_masks_and_channels_last": "PASSED",
        "test_norm_and_its_gradient_in_torch": "PASSED",
        "test_a_wrong_result": "FAILED",
    }
    assert {name: outcome for outcome, name in lines} == expected, done.stdout + done.stderr
    found = json.loads(counts.read_text())
    assert found["engine"] == "cpu"
    assert found["files"] == {
        "test_user.py": {
            **{"options": "--fusegraph-capability=9.0 --fusegraph-operations=1e+06"},
            **{"passed": 3, "failed": 1, "skipped": 2, "graphs": 6, "served": 5, "right": 3},
            "refused": {"there is no op for block_scale_quantize": 1},
            "not run": {"too large": 1},
        }
    }
    assert "test_user.py: 3 passed, 1 failed, 2 skipped, 6 graphs, 5 served, 3 right" in done.stdout


def test_the_counts_that_are_kept():
    """tests/cudnn_frontend_tests.json, of which docs/cudnn.md has a table: of kernels, every graph accounted for."""
    found = json.loads((HERE / "cudnn_frontend_tests.json").read_text("utf-8"))
    assert found["engine"] == "cpu"
    for name, counts in found["files"].items():
        assert counts["graphs"] - counts["served"] == sum(counts["refused"].values()), name
        assert counts["right"] <= counts["served"], name
