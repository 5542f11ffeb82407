"""What is made of results: the picture, the tables of the README, and the results that are committed."""

from __future__ import annotations

import json
import os
import re
import runpy
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
from test_bench import ENVIRONMENT, ROOT, ROW_KEYS

from benchmarks import summary
from codegen.target import target
from fusegraph.bench.plot import standings, svg
from fusegraph.bench.refused import refused
from fusegraph.bench.results import Row, document, read, runs
from fusegraph.plan import by_cost_model, plan
from fusegraph.report import artifacts

# --- the picture and the tables


def result() -> dict:
    rows = [
        Row("one & <two>", "cuda", 10.0, 9.5, 0.95, 0.1, 4.0, "k"),
        Row("one & <two>", "cudnn", 12.5, 9.5, 0.76, 0.3, 9.0, "engine"),
        Row("one & <two>", "torch", 2500.0, 9.5, 0.0038, 0.3, 9.0, "eager"),
        Row("one & <two>", "plain", 9.0, 9.5, 1.06, 0.3, 9.0, "part"),
        Row("alone", "cuda", 8.0, 10.0, 1.25, 0.3, 6.0, "k"),
        Row("alone", "cudnn", None, 10.0, None, None, None, "refused"),
        Row("later", "cuda", None, 5.0, None, None, None, "not in the op table yet"),
        Row("later", "torch", 7.0, 5.0, 0.71, 0.3, 9.0, "eager"),
    ]
    return document(ENVIRONMENT, "--suite memory-bound", 15, rows, complete=True)


ONES = ("one & <two>", "alone")


def test_standings():
    first, alone, later = standings(result()["rows"])
    assert (first.ours["median_us"], first.peer["engine"], first.floor_us) == (10.0, "cudnn", 9.5)
    assert first.part["median_us"] == 9.0  # a part is no peer, be it the fastest
    assert (alone.ours["median_us"], alone.peer, alone.part) == (8.0, None, None)
    assert (later.ours, later.peer["engine"]) == (None, "torch")


def test_the_picture():
    text = svg(result())
    assert text == svg(json.loads(artifacts.json_text(result())))
    tree = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    words = [t.text for t in tree.iter(f"{space}text")]
    assert "one & <two>" in words
    assert "10.0 us" in words
    assert "12.5 us  cudnn" in words
    assert "floor" in words
    assert "later" not in words
    assert "1 of 3 workloads are not shown: fusegraph does not run them." in words
    bars = [r for r in tree.iter(f"{space}rect") if float(r.get("height")) == 11 and float(r.get("y")) > 40]
    ours = [float(r.get("width")) for r in bars if r.get("class") == "ours"]
    (peer,) = [float(r.get("width")) for r in bars if r.get("class") == "peer"]
    assert ours[0] / ours[1] == pytest.approx(0.95 / 1.25, rel=1e-2)
    assert peer / ours[0] == pytest.approx(0.76 / 0.95, rel=1e-2)
    (floor,) = (line for line in tree.iter(f"{space}line") if line.get("class") == "floor")
    left = float(bars[0].get("x"))
    assert (float(floor.get("x1")) - left) / ours[1] == pytest.approx(1 / 1.25, rel=1e-2)
    width = float(tree.get("width"))
    assert all(left + w < width for w in ours)


def test_a_run_in_a_sentence(tmp_path, capsys):
    told = result()
    assert summary.ratios(told["rows"]) == {"one & <two>": 1.25, "later": 0.0}
    said = "Over the one row with a peer the ratio's geometric mean is 1.25, the worst 1.25 (one & <two>)"
    assert summary.sentence(told["rows"]) == f"{said}; 1 more runs only on peers."
    rows = [
        {"workload": name, "engine": engine, "median_us": us, "floor_us": 1.0}
        for name, *times in (
            ("a", 10.0, 20.0, 30.0),
            ("b", 10.0, 5.0, None),
            ("c", 10.0, 90.0, 80.0),
            ("d", 1.0, None, None),
        )
        for engine, us in zip(("cuda", "cudnn", "torch"), times)
    ]
    assert summary.ratios(rows) == {"a": 2.0, "b": 0.5, "c": 8.0}
    said = "Over the 3 rows with a peer the ratio's geometric mean is 2.00, the worst 0.50 (b)."
    assert summary.sentence(rows) == said
    assert summary.sentence([]) == summary.sentence(rows[-3:]) == ""
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"rows": rows}))
    assert summary.main([str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: {said}\n  0.50  b\n"
    assert summary.main([]) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": 3}', '{"rows": [{}]}', "\xff", None])
def test_a_file_that_holds_no_run(text, tmp_path, capsys):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text, "latin-1")
    assert summary.main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"{path} ")


def test_the_picture_of_nothing():
    nothing = document(ENVIRONMENT, "--suite memory-bound", 15, [], complete=True)
    assert ElementTree.fromstring(svg(nothing)).tag.endswith("svg")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """tools/readme.py over a README and results of its own."""
    module = runpy.run_path(str(ROOT / "tools" / "readme.py"))
    readme, results = tmp_path / "README.md", tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    readme.write_text("before\n<!-- generated: measurements -->\nold\n<!-- end -->\nafter\n")
    names = module["main"].__globals__
    monkeypatch.setitem(names, "README", readme)
    monkeypatch.setitem(names, "RESULTS", results)
    monkeypatch.setitem(names, "PAGES", {readme: names["readme_makers"]})  # no other page is written
    return SimpleNamespace(main=module["main"], readme=readme, results=results)


def test_tables_without_results(tool):
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 0
    assert "Nothing has been measured yet" in tool.readme.read_text()
    assert tool.main(["--check"]) == 0


def test_tables(tool, capsys):
    path = tool.results / "gpu.json"
    path.write_text(artifacts.json_text(result()))
    assert tool.main([]) == 0
    text = tool.readme.read_text()
    assert text.startswith("before\n<!-- generated")
    assert text.endswith("<!-- end -->\nafter\n")
    rows = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        ["one & <two>", "10.0", "cudnn", "12.5", "1.25", "0.95", "9.0"],
        ["alone", "8.0", "-", "-", "-", "1.25", "-"],
        ["later", "-", "torch", "7.0", "-", "-", "-"],
    ]
    for word in ("Pretended GPU, 2026-01-02", "`0123456789ab`", "driver 13.0", "fusegraph 0.1.0", "results/gpu.svg",
                 "(benchmarks/results/gpu.json)", "--suite memory-bound --json benchmarks/results/gpu.json", "0.20 s",
                 "5.0 us", summary.sentence(result()["rows"])):  # fmt: skip
        assert word in text
    assert "torch None" not in text
    assert (tool.results / "gpu.svg").read_text() == svg(result())
    assert tool.main(["--check"]) == 0
    capsys.readouterr()
    (tool.results / "gpu.svg").write_text("drawn by hand\n")
    assert tool.main(["--check"]) == 1
    assert "-drawn by hand" in capsys.readouterr().out
    path.unlink()
    assert tool.main(["--check"]) == 1
    assert "gpu.svg: there is no gpu.json" in capsys.readouterr().out
    assert tool.main([]) == 0
    assert os.listdir(tool.results) == []


def test_the_table_of_calls(tool):
    rows = [
        Row("w", "cuda", 3.0, 3.0, 1.0, 0.0456, 6.04, "k", cached_s=0.0019, replay_us=2.2),
        Row("w", "cudnn", 9.0, 3.0, 0.33, 0.25, 10.3, "plan"),
        Row("w", "cupy", None, 3.0, None, None, None, "not installed"),
    ]
    told = document(ENVIRONMENT, "--suite calls", 15, rows, complete=True)
    (tool.results / "gpu.json").write_text(artifacts.json_text(told))
    assert tool.main([]) == 0
    text = tool.readme.read_text()
    assert "| workload | engine | build s | from the disk cache s | host us a call | replay us |" in text
    assert "| w | cuda | 0.046 | 0.0019 | 6.0 | 2.2 |" in text
    assert "| w | cudnn | 0.250 | - | 10.3 | - |" in text
    assert "| w | cupy |" not in text


#: As cuDNN says it.
NO_ENGINE = (
    "no engine proposed a plan for this graph (the backend declined: No valid engine configs for _ {...} "
    "Warning: CUDNN_STATUS_NOT_SUPPORTED_LAYOUT; Reason: !(tensor) Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; "
    "Warning: CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN"
)


def test_the_table_of_cudnns_answers(tool):
    rows = [
        Row("softmax", "cuda", 20.0, 18.0, 0.9, 0.1, 5.0, "k", kernels=1),
        Row("softmax", "cudnn", None, 18.0, None, None, None, "cuDNN's graph API has no softmax ('out')"),
        Row("relu|mul", "cuda", 30.0, 15.0, 0.5, 0.1, 5.0, "k, l", kernels=2),
        Row("relu|mul", "cudnn", None, 15.0, None, None, None, NO_ENGINE),
        Row("norm", "cuda", 30.0, 15.0, 0.5, 0.1, 5.0, "k", kernels=1),
        Row("norm", "cudnn", None, 15.0, None, None, None, "proposes plans, but none of them builds and runs: NVRTC"),
        Row("long", "cuda", 30.0, 15.0, 0.5, 0.1, 5.0, "k", kernels=1),
        Row("long", "cudnn", None, 15.0, None, None, None, "word " * 50),
        Row("taken", "cuda", 40.0, 10.0, 0.25, 0.1, 5.0, "k"),
        Row("taken", "cudnn", 50.0, 10.0, 0.2, 0.1, 5.0, "eng0", kernels=1),
        Row("failed", "cuda", None, 10.0, None, None, None, "a defect"),
    ]
    told = document(ENVIRONMENT, "--suite refused --peers cudnn", 15, rows, complete=True)
    (tool.results / "gpu.json").write_text(artifacts.json_text(told))
    assert tool.main([]) == 0
    lines = [line for line in tool.readme.read_text().splitlines() if line.startswith("| ")]
    assert lines == [
        "| graph | cuDNN's answer | kernels here | fusegraph us | floor us | of the floor |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| softmax | refused: cuDNN's graph API has no softmax ('out') | 1 | 20.0 | 18.0 | 0.90 |",
        "| relu\\|mul | refused: no valid engine configs (not supported: layout, graph pattern) | 2 | 30.0 | 15.0 "
        "| 0.50 |",
        "| norm | refused: proposes plans, but none of them builds and runs | 1 | 30.0 | 15.0 | 0.50 |",
        "| long | refused: " + "word " * 24 + "... | 1 | 30.0 | 15.0 | 0.50 |",
        "| taken | runs: 50.0 us | - | 40.0 | 10.0 | 0.25 |",
        "| failed | not asked | - | - | - | - |",
    ]


#: Graphs that cuDNN refuses and that are two kernels: two products in a row.
SEVERAL = {"conv 3x3(relu(conv 3x3)) 64x64x56x56 NHWC": 2, "gelu(x @ up) @ down 8192x1024->4096->1024": 2}


def test_what_cudnn_refuses_takes_few_kernels():
    kernels = {w.name: len(plan(w.graph(), choose=by_cost_model(target("sm_90a"))).kernels) for w in refused()}
    assert kernels == {name: SEVERAL.get(name, 1) for name in kernels}


def test_several_results_of_a_device(tool):
    """Each file has its table, its picture and its command, in the order of their names."""
    rest = [row for row in result()["rows"] if row["engine"] != "plain"]
    other = {**result(), "rows": rest, "options": "--suite tensor-core --only 'conv 3x3'"}
    (tool.results / "gpu-b.json").write_text(artifacts.json_text(other))
    (tool.results / "gpu-a.json").write_text(artifacts.json_text(result()))
    old = {k: v for k, v in result().items() if k != "options"}
    (tool.results / "gpu-c.json").write_text(artifacts.json_text(old))
    assert tool.main([]) == 0
    text = tool.readme.read_text()
    places = [text.index(f"--json benchmarks/results/gpu-{name}.json") for name in "abc"]
    assert places == sorted(places)
    assert "bench --suite tensor-core --only 'conv 3x3' --json benchmarks/results/gpu-b.json" in text
    assert "bench --suite board --json benchmarks/results/gpu-c.json" in text
    assert text.count("**Pretended GPU, 2026-01-02**") == text.count("| one & <two> |") == 3
    assert text.count("product alone us") == 2  # where there is such a row
    assert sorted(os.listdir(tool.results)) == [f"gpu-{name}.{kind}" for name in "abc" for kind in ("json", "svg")]
    assert tool.main(["--check"]) == 0


def test_rows_of_several_commits(tool, capsys):
    """Tables, picture and summary say that the rows are of several commits, and which."""
    path = tool.results / "gpu.json"
    earlier = [{"commit": c, "date": f"2025-12-3{n}", "workloads": [w]} for n, (c, w) in enumerate(zip("ab", ONES))]
    told = {**result(), "earlier": earlier}
    path.write_text(artifacts.json_text(told))
    assert [(run.commit, run.workloads) for run in runs(told)] == [
        ("a", ("one & <two>",)),
        ("b", ("alone",)),
        ("0123456789ab", ("later",)),
    ]
    assert tool.main([]) == 0
    wanted = "**Pretended GPU, 2025-12-30..2026-01-02** ([`gpu.json`](benchmarks/results/gpu.json)): "
    assert f"{wanted}rows measured at commits `a`..`0123456789ab`, sm_90a," in tool.readme.read_text()
    caption = "Pretended GPU, 2025-12-30..2026-01-02, rows measured at commits a..0123456789ab"
    assert f">{caption}<" in (tool.results / "gpu.svg").read_text()
    assert summary.main([str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path} (rows measured at commits a..0123456789ab): Over the one row")
    same = [{**run, "commit": "0123456789ab"} for run in earlier]
    path.write_text(artifacts.json_text({**told, "earlier": same}))  # of one commit on several days
    assert tool.main([]) == 0
    assert f"{wanted}commit `0123456789ab`, sm_90a," in tool.readme.read_text()


def test_runs_cut_short_make_no_table(tool):
    path = tool.results / "gpu.json"
    path.write_text(artifacts.json_text({**result(), "complete": False}))
    with pytest.raises(ValueError, match=r"gpu\.json is of a run that was interrupted"):
        tool.main([])


def test_committed_results_are_whole():
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        told = json.loads(path.read_text())
        assert told["complete"] is True, path.name
        assert set(told) - {"options", "earlier"} == {*ENVIRONMENT, "repeats", "complete", "rows"}, path.name
        for run in runs(read(path)):
            assert not str(run.commit).endswith("+"), f"{path.name} is of a checkout with changes"
        for row in told["rows"]:
            assert set(row) | {"kernels"} == ROW_KEYS  # which the first results did not count
            if row["median_us"] is not None:
                assert row["floor_fraction"] == pytest.approx(row["floor_us"] / row["median_us"])


def test_times_of_models_stand_beside_each_other(tmp_path, monkeypatch):
    """What benchmarks/torch_bench.py writes is a table as soon as it is there; what failed says why."""
    module = runpy.run_path(str(ROOT / "tools" / "readme.py"))["torch"]
    folder = ROOT / "benchmarks" / "results" / "torch"
    (tmp_path / "fusion.json").write_text((folder / "fusion.json").read_text())
    monkeypatch.setitem(module.__globals__, "TORCH", tmp_path)
    without = module()
    numbers = {"call_us": 30.0, "first_s": 2.345, "kernels": 65, "error": 0.00123, "note": ""}
    nothing = dict.fromkeys(numbers, None) | {"device_us": None, "note": "OutOfMemoryError: a | b\nand more"}
    rows = [
        {"model": "ResNet-50", "dtype": "bf16", "engine": "fusegraph", "device_us": 20.0, **numbers},
        {"model": "ResNet-50", "dtype": "bf16", "engine": "eager", "device_us": 50.0, **numbers},
        {"model": "ResNet-50", "dtype": "bf16", "engine": "compile-max", **nothing},
        {"model": "ResNet-50", "dtype": "fp32", "engine": "fusegraph", **nothing},
        {"model": "ResNet-50", "dtype": "fp32", "engine": "eager", "device_us": 40.0, **numbers},
    ]
    told = {**ENVIRONMENT, "complete": True, "rows": rows}
    (tmp_path / "some-gpu.json").write_text(json.dumps(told))
    text = module()
    assert set(without.splitlines()) < set(text.splitlines())
    lines = [line for line in text.splitlines() if line.startswith("| ResNet-50 |")]
    assert lines == [
        "| ResNet-50 | bf16 | fusegraph | 20 | 1.00 | 30 | 2.35 | 65 | 1.2e-03 |",
        "| ResNet-50 | bf16 | eager | 50 | 2.50 | 30 | 2.35 | 65 | 1.2e-03 |",
        "| ResNet-50 | bf16 | compile-max | failed: OutOfMemoryError: a \\| b and more | - | - | - | - | - |",
        "| ResNet-50 | fp32 | fusegraph | failed: OutOfMemoryError: a \\| b and more | - | - | - | - | - |",
        "| ResNet-50 | fp32 | eager | 40 | - | 30 | 2.35 | 65 | 1.2e-03 |",
    ]


def test_committed_results_of_torch_are_whole():
    folder = ROOT / "benchmarks" / "results" / "torch"
    told = json.loads((folder / "fusion.json").read_text())
    assert {row["model"] for row in told["rows"]} == {"ResNet-50", "MobileNetV3-Large", "ViT-B/16 block", "GPT-2 block"}
    for row in told["rows"]:
        assert row["kernels"] < row["operators"]
        assert row["bytes_moved"] < row["bytes_unfused"]
        assert not row["left"]
    for path in set(folder.glob("*.json")) - {folder / "fusion.json"}:
        timed = json.loads(path.read_text())
        assert timed["complete"] is True, path.name
        assert not str(timed["commit"]).endswith("+"), f"{path.name} is of a checkout with changes"
