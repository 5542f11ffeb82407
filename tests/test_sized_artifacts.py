"""Graphs with Dims on disk: what the command line writes of them, and what a second process finds in the cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import fusegraph as fg
from codegen.size_expressions import expression, value
from codegen.spec import Scalar
from fusegraph.cli import main
from fusegraph.engines import plans
from fusegraph.errors import ArgumentError
from fusegraph.lowering.base import Options
from fusegraph.ranges import plan_ranges
from fusegraph.runtime.cache import DiskCache
from fusegraph.runtime.targets import named

FILE = """
import fusegraph as fg
graph = fg.Graph("net", io_dtype="float16")
n, m = fg.Dim("n", max=512), fg.Dim("m", min=8, max=64, multiple_of=8)
x, w = graph.tensor("x", (n, 64)), graph.tensor("w", (64, m))
graph.output(graph.softmax(graph.matmul(x, w), axis=-1), name="y")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(FILE)
    return str(path)


def net() -> fg.Graph:
    names: dict[str, fg.Graph] = {}
    exec(FILE, names)
    return names["graph"]


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def groups_of(facts: dict) -> list[dict]:
    every = [facts, *(each["plan"] for each in facts["aligned"])]
    return [group for plan in every for each in plan["ranges"] for group in each["groups"]]


@pytest.mark.parametrize("engine", ["cuda", "cpu"])
def test_compile_writes_all_kernels_and_how_they_are_launched(engine, file, tmp_path, capsys) -> None:
    target = ["--target", "sm_90a"] if engine == "cuda" else []
    assert main(["compile", file, "--engine", engine, *target, "--dim", "n=2..64", "--out", str(tmp_path)]) == 0
    assert re.search(r"net for (sm_90a|cpu): \d+ kernels for \d+ ranges? of sizes", capsys.readouterr().out)
    folder = tmp_path / "net"
    facts = manifest_of(folder)
    assert facts["symbols"] == {"n": 1, "m": 8}
    written = {k["name"] for k in facts["kernels"]}
    kernels = [k for group in groups_of(facts) for k in group["kernels"]]
    assert {k["name"] for k in kernels} == written
    for kernel in facts["kernels"]:
        assert f" {kernel['name']}(" in (folder / kernel["source"]).read_text()
        assert engine == "cpu" or (folder / kernel["cubin"]).stat().st_size > 0


def test_a_manifest_tells_the_launch_of_every_size(file, tmp_path) -> None:
    assert main(["compile", file, "--engine", "cpu", "--out", str(tmp_path), "--json"]) == 0
    facts = manifest_of(tmp_path / "net")
    planned = plan_ranges(net(), Options())

    def known(text: object, sizes: dict[str, int]) -> object:
        return value(expression(text, ("n", "m")), sizes) if isinstance(text, str) else text

    for sizes in ({"n": 1, "m": 1}, {"n": 1, "m": 5}, {"n": 77, "m": 1}, {"n": 333, "m": 7}):
        inside = {name: sizes[name] * unit for name, unit in facts["symbols"].items()}
        (found,) = [
            r for r in facts["ranges"] if all(low <= inside[d] <= high for d, (low, high) in r["sizes"].items())
        ]
        plan = planned.known(sizes)
        assert plan is not None
        for kernel, group in zip(plan.kernels, found["groups"], strict=True):
            (launched,) = [k for k in group["kernels"] if k["name"] == kernel.name]
            assert tuple(known(n, sizes) for n in launched["grid"]) == kernel.source.grid
            assert tuple(launched["block"]) == kernel.source.block
            numbers = [known(p["value"], sizes) for p in launched["parameters"] if "value" in p]
            assert numbers == [p.value for p in kernel.source.parameters or () if isinstance(p, Scalar)]


def test_the_command_line_takes_ranges_of_sizes(file, capsys, tmp_path) -> None:
    assert main(["explain", file, "--dim", "n=4..32", "--json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    ranges = [r["sizes"]["n"] for r in graph["ranges"]]
    assert (min(low for low, _ in ranges), max(high for _, high in ranges)) == (4, 32)
    assert main(["run", file, "--engine", "cpu", "--dim", "n=4..32", "--dim", "m=8..16:8", "--check", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["graphs"]
    assert {run["sizes"]["n"] for run in runs} == {4, 8, 32}
    for command in ("compile", "run", "explain"):
        more = ["--out", str(tmp_path)] if command == "compile" else []
        assert main([command, file, "--dim", "n=0..32", *more]) != 0
        assert "takes from 1 to 512" in capsys.readouterr().err


def test_a_second_process_plans_and_compiles_nothing(tmp_path, monkeypatch) -> None:
    cache = DiskCache(tmp_path)
    net().compile("cpu", cache=cache)
    monkeypatch.setattr(plans, "plan_ranges", None)
    monkeypatch.setattr("fusegraph.runtime.host_compiler._compile", None)
    executable = net().compile("cpu", cache=cache)
    w = np.ones((64, 24), np.float16)
    for n in (1, 3, 100, 512):
        np.testing.assert_allclose(executable(np.ones((n, 64), np.float16), w), 1 / 24, rtol=1e-2)
    with pytest.raises(ArgumentError, match="from 1 to 512"):
        executable(np.ones((513, 64), np.float16), w)


def test_kernels_of_several_ranges_are_one() -> None:
    graph = fg.Graph("rows", io_dtype="bfloat16")
    x = graph.tensor("x", (fg.Dim("b", max=32), fg.Dim("s", max=512), 64))
    graph.output(graph.relu(x @ graph.tensor("w", (64, 64))), name="y")
    planned = plan_ranges(graph, Options(target=named("h200")))
    assert len({s.code for s in planned.sources}) == len({s.name for s in planned.sources}) == len(planned.sources)
