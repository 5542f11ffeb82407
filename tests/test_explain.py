"""Plans described as data and as text."""

from __future__ import annotations

import json

import pytest

import fusegraph as fg
from codegen import target
from fusegraph.cli import main
from fusegraph.lowering.base import Options
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.artifacts import json_text
from fusegraph.report.explain import count_text, describe, explain_text, size_text


def conv_block() -> fg.Graph:
    graph = fg.Graph("block")
    x = graph.tensor("x", (1, 8, 6, 6))
    w1, w2 = (graph.tensor(name, (8, 8, 3, 3)) for name in ("w1", "w2"))
    hidden = graph.relu(graph.conv_fprop(x, w1, padding=1, name="conv1"), name="hidden")
    graph.output(graph.conv_fprop(hidden, w2, padding=1, name="conv2") + x, name="y")
    return graph


def diamond() -> fg.Graph:
    """Returns a graph p -> mm -> q and p -> q.  Fusing p with q would create a cycle through mm."""
    graph = fg.Graph("diamond")
    a, w = graph.tensor("a", (4, 4)), graph.tensor("w", (4, 4))
    p = graph.exp(a, name="p")
    graph.output(graph.matmul(graph.relu(graph.matmul(p, w, name="mm"), name="r"), p, name="q"), name="q")
    return graph


def test_every_node_is_in_its_kernel():
    facts = describe(plan(conv_block()))
    assert len(facts["kernels"]) == 2
    for node in facts["nodes"]:
        (kernel,) = (k for k in facts["kernels"] if node["name"] in k["nodes"])
        assert (node["kernel"], node["kernel_name"]) == (kernel["number"], kernel["name"])
    assert [k["number"] for k in facts["kernels"]] == [1, 2]


def test_the_kernel_of_a_node_is_one_even_where_several_share_its_code():
    graph = fg.Graph("alike", io_dtype="float16")
    x = graph.tensor("x", (40, 24))
    for number in range(4):
        x = graph.relu(x @ graph.tensor(f"w{number}", (24, 24)))
    graph.output(x.T, name="y")
    facts = describe(plan(graph))
    assert len({k["name"] for k in facts["kernels"]}) < len(facts["kernels"])
    computed = [n for n in facts["nodes"] if n["name"] not in {v["name"] for v in facts["views"]}]
    for node in computed:
        kernel = facts["kernels"][node["kernel"] - 1]
        assert node["name"] in kernel["nodes"]
        assert node["kernel_name"] == kernel["name"]
    for node in facts["nodes"]:
        if node not in computed:
            assert (node["kernel"], node["kernel_name"]) == (None, None)


def test_bytes_add_up():
    graph = conv_block()
    facts = describe(plan(graph))
    image, filters = 4 * 8 * 6 * 6, 4 * 8 * 8 * 3 * 3
    assert facts["bytes_moved"] == (image + filters + image) + (image + filters + image + image)
    assert facts["bytes_unfused"] == 2 * (image + filters + image) + 2 * image + 3 * image
    saved = sum(k["bytes_saved"] for k in facts["kernels"])
    assert saved == facts["bytes_unfused"] - facts["bytes_moved"] == 4 * image
    assert facts["kernels_unfused"] == 4
    assert facts["workspace"] == {"hidden": {"offset": 0, "bytes": image}}
    assert facts["workspace_bytes"] >= image


def test_without_fusion_nothing_is_saved():
    facts = describe(plan(conv_block(), fusion=False))
    assert len(facts["kernels"]) == facts["kernels_unfused"] == 4
    assert facts["bytes_moved"] == facts["bytes_unfused"]
    assert {d["fused"] for d in facts["decisions"]} == {False}


def test_a_split_has_its_reason():
    facts = describe(plan(diamond()))
    declined = [d for d in facts["decisions"] if not d["fused"]]
    assert declined
    assert all(d["reason"] for d in facts["decisions"])
    text = explain_text(facts)
    for decision in declined:
        assert f"{decision['producer']} -> {decision['consumer']}" in text


def test_siblings_are_told():
    graph = fg.Graph("siblings")
    a = graph.tensor("a", (64, 64))
    graph.output(graph.exp(a, name="e"), name="e")
    graph.output(graph.sin(a, name="s"), name="s")
    facts = describe(plan(graph))
    (decision,) = facts["decisions"]
    assert decision["shared_input"] == "a"
    assert "e beside s" in explain_text(facts)


def test_simplified_away():
    graph = fg.Graph("simple")
    a = graph.tensor("a", (8,))
    graph.exp(a, name="unused")
    graph.output(graph.neg(a * 1.0, name="y"), name="y")
    facts = describe(plan(graph))
    assert facts["simplified_away"] == ["unused", "mul"]
    assert "simplified away: unused, mul" in explain_text(facts)


def test_json_of_awkward_attributes():
    graph = fg.Graph("awkward")
    a = graph.tensor("a", (8,))
    graph.output(graph.cast(graph.relu(a, name="r"), "bf16"), name="y")
    facts = json.loads(json_text(describe(plan(graph, Options(strict=True)))))
    relu, cast = facts["nodes"]
    assert relu["attributes"] == {"lower_clip": 0.0, "upper_clip": None, "negative_slope": 0.0}
    assert cast["attributes"] == {"dtype": "bfloat16", "saturate": True}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit(width):
    graph = conv_block()
    for number in range(30):
        graph.output(graph.exp(graph.outputs[0] + float(number)), name=f"out{number}")
    lines = explain_text(describe(plan(graph)), width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("more" in line for line in lines)


def test_sizes_in_words():
    assert [size_text(n) for n in (0, 999, 1000, 12_600_000, 999_960, 3 * 10**15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "12.6 MB",
        "1.0 MB",
        "3000.0 TB",
    ]
    assert [count_text(n, "kernel") for n in (0, 1, 2)] == ["0 kernels", "1 kernel", "2 kernels"]


WINDOWS = "the rows of operand A are no windows of an image"
THIN = {"thin": "neither operand has at most 16 rows or columns"}
PARTS = {
    "thin": "float32 is multiplied in parts by warpgroups only",
    "wgmma": "",
    "mma": "float32 is multiplied in parts by",
    "halo": WINDOWS,
    "stem": WINDOWS,
}


@pytest.mark.parametrize(
    ("dtype", "arch", "form", "reasons"),
    [
        ("bfloat16", "sm_90a", "wgmma", THIN),
        ("bfloat16", "sm_80", "mma", {**THIN, "wgmma": "sm_80 has no warpgroup matrix products"}),
        ("float32", "sm_90a", "wgmma", {"thin": "float32 is multiplied in parts by warpgroups only"}),
        ("float32", "sm_80", "stream", {**PARTS, "wgmma": "sm_80 has no warpgroup"}),
        (
            "float64",
            "sm_90a",
            "stream",
            dict.fromkeys(("thin", "wgmma", "mma", "halo", "stem"), "tensor cores do not multiply float64"),
        ),
    ],
)
def test_why_a_contraction_has_no_faster_form(dtype, arch, form, reasons):
    graph = fg.Graph("product", io_dtype=dtype)
    graph.output(graph.relu(graph.tensor("a", (64, 64)) @ graph.tensor("b", (64, 64))), name="y")
    facts = describe(plan(graph, choose=by_cost_model(target(arch))), target(arch))
    (kernel,) = facts["kernels"]
    assert kernel["schedule"]["type"] == form
    told = kernel["declined_forms"]
    assert list(told) == list(reasons)
    assert all(told[name].startswith(reason) for name, reason in reasons.items())
    lines = [line.strip() for line in explain_text(facts, 200).splitlines()]
    expected = [
        f"no {' or '.join(name for name in told if told[name] == reason)}: {reason}"
        for reason in dict.fromkeys(told.values())
    ]
    assert [line for line in lines if line.startswith("no ")] == expected


def test_other_families_have_no_forms():
    graph = fg.Graph("pointwise")
    graph.output(graph.relu(graph.tensor("a", (64, 64))), name="y")
    assert [k["declined_forms"] for k in describe(plan(graph))["kernels"]] == [{}]


# --- the command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "two.py"
    path.write_text(
        "import fusegraph as fg\n"
        "first = fg.Graph('first')\n"
        "first.output(first.relu(first.tensor('a', (4, 9)) + 1.0), name='y')\n"
        "second = fg.Graph('second')\n"
        "a, w = second.tensor('a', (4, 4)), second.tensor('w', (4, 4))\n"
        "second.output(second.matmul(second.matmul(a, w, name='m1'), w, name='m2'), name='z')\n"
    )
    return str(path)


def test_the_text_in_a_pipe(file, capsys):
    assert main(["explain", file]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.index("graph first") < text.index("graph second")
    assert main(["explain", file, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [g["name"] for g in told["graphs"]] == ["first", "second"]
    words = " ".join(text.split())
    for graph in told["graphs"]:
        assert set(graph) == {
            "name",
            "inputs",
            "outputs",
            "nodes",
            "simplified_away",
            "algorithms",
            "pruned",
            "choices",
            "packed",
            "packing",
            "views",
            "kernels",
            "kernels_unfused",
            "bytes_unfused",
            "bytes_moved",
            "decisions",
            "saved",
            "workspace_bytes",
            "workspace",
            "in_donated",
        }
        for decision in graph["decisions"]:
            assert decision["reason"] in words


def test_forms_of_the_architecture_asked_for(file, capsys):
    told = {}
    for arch in ("sm_80", "sm_90a"):
        assert main(["explain", f"{file}:second", "--target", arch, "--json"]) == 0
        (graph,) = json.loads(capsys.readouterr().out)["graphs"]
        told[arch] = [k["declined_forms"]["wgmma"] for k in graph["kernels"]]
    assert told["sm_80"] == ["sm_80 has no warpgroup matrix products"] * 2
    assert told["sm_90a"] == ["float32 products are exact unless the graph asks for tf32"] * 2


def test_options_reach_the_plan(file, capsys):
    assert main(["explain", f"{file}:first", "--no-fusion", "--json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert [k["nodes"] for k in graph["kernels"]] == [["add"], ["y"]]


def test_the_source_of_a_kernel(file, capsys):
    assert main(["explain", file, "--kernel", "first_kernel"]) == 0
    code = capsys.readouterr().out
    assert '#include "types.cuh"' in code
    assert code.rstrip().endswith("}")
    assert main(["explain", file, "--kernel", "first_kernel", "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert set(kernel) == {"graph", "name", "family", "nodes", "code"}
    assert kernel["code"].rstrip() == code.rstrip()
    assert main(["explain", file, "--kernel", "nothing"]) == 2
    assert "the kernels are: first_kernel" in capsys.readouterr().err
