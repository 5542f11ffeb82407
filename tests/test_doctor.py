"""What doctor finds, and what it says where something is missing."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

import codegen
import fusegraph
from fusegraph.cli import main
from fusegraph.errors import ToolchainError
from fusegraph.report.doctor import Finding, diagnose
from fusegraph.runtime import cache, driver, host_compiler, nvrtc

KEYS = {"name", "found", "version", "path", "detail", "needed", "install"}


def refuse(*arguments: object, **more: object) -> None:
    raise ToolchainError("not here")


def find(name: str) -> Finding:
    (finding,) = (f for f in diagnose().findings if f.name == name)
    return finding


def test_this_machine(capsys):
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"ok", "compiles", "runs_on_gpu", "runs_on_cpu", "findings"}
    found = {f["name"]: f for f in told["findings"]}
    assert all(set(f) == KEYS for f in told["findings"])
    assert found["fusegraph"]["version"] == fusegraph.__version__
    assert found["codegen"]["path"] == str(Path(codegen.__file__).parent)
    assert found["codegen"]["detail"] == "the one that came with fusegraph"
    assert "sm_90a" in found["NVRTC"]["detail"]
    assert found["NVRTC"]["path"].endswith(".so.13")
    assert found["C++ compiler"]["version"]
    assert found["cache folder"]["found"]
    assert told["ok"] is told["compiles"] is told["runs_on_cpu"] is True
    assert told["runs_on_gpu"] is driver.available()


def test_text_fits_a_pipe(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "can compile kernels for GPUs" in out
    assert all(len(line) <= 80 or "/" in line for line in out.splitlines())


def test_everything_missing(monkeypatch, capsys):
    monkeypatch.setattr(nvrtc, "nvrtc_version", refuse)
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "no driver, said the test")
    monkeypatch.setattr(host_compiler, "find_compiler", refuse)

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    for expected in ("pip install", "apt install g++", "NVIDIA's driver", "fusegraph[cudnn]", "said the test"):
        assert expected in out
    assert "cannot compile kernels for GPUs" in out
    assert "cannot run them on the CPU here" in out


@pytest.mark.parametrize("missing", ["nvrtc", "compiler"])
def test_one_of_two_is_enough(missing, monkeypatch):
    if missing == "nvrtc":
        monkeypatch.setattr(nvrtc, "nvrtc_version", refuse)
    else:
        monkeypatch.setattr(host_compiler, "find_compiler", refuse)
    diagnosis = diagnose()
    assert diagnosis.ok
    assert diagnosis.compiles is (missing != "nvrtc")
    assert diagnosis.runs_on_cpu is (missing != "compiler")


def test_a_compiler_that_cannot_compile(monkeypatch, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ 1.0" && exit 0\necho "no headers" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("FUSEGRAPH_CXX", str(broken))
    finding = find("C++ compiler")
    assert not finding.found
    assert "no headers" in finding.detail
    assert finding.install


def test_a_probe_that_breaks_is_a_finding(monkeypatch):
    def broken() -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(nvrtc, "supported_archs", broken)
    assert find("NVRTC").detail == "RuntimeError: unexpected"
    assert find("C++ compiler").found


def test_gpus_are_listed(monkeypatch):
    sizes = (132, 60 << 20, 227 << 10, 150 * 10**9, 1980.0, 4.8e6)
    gpu = driver.DeviceProperties(0, "NVIDIA H200", (9, 0), *sizes)
    monkeypatch.setattr(driver, "unavailable_reason", lambda: None)
    monkeypatch.setattr(driver, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "properties", lambda index: gpu)
    finding = find("GPU 0")
    assert finding.version == "NVIDIA H200"
    assert "sm_90a, 132 SMs, 150.0 GB; target h200: measured: l2_bytes" in finding.detail
    assert diagnose().runs_on_gpu


@pytest.mark.filterwarnings("ignore:the cache folder")
def test_a_cache_folder_that_cannot_be(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("fusegraph.report.doctor.default_cache", cache.DiskCache)
    finding = find("cache folder")
    assert not finding.found
    assert "FUSEGRAPH_CACHE_DIR" in finding.install
