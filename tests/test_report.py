"""Reports as data and as files: what is in them, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("igraph")
pytest.importorskip("pygments")

from codegen.target import target
from fusegraph.cli import main
from fusegraph.errors import FileError, ToolchainError
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.origins import Origin, calling_line, written_for
from fusegraph.plan import plan
from fusegraph.report.page.alike import Repeat, repeats
from fusegraph.report.page.differences import differences
from fusegraph.report.page.facts import facts_of
from fusegraph.report.page.file import load, save, write
from fusegraph.report.page.placing import GAP, LAYER_GAP, WIDTH, placed
from fusegraph.report.page.times import with_times

H200 = target("h200")
EXAMPLE = str(Path(__file__).parents[1] / "examples" / "conv_bias_relu.py")


def facts(graph: Graph, machine: str = "h200") -> dict:
    chosen = target(machine)
    return facts_of([plan(graph, Options(target=chosen))], chosen, title=graph.name)


def block() -> Graph:
    """Returns two products with pointwise nodes, a composite, a view, and a node that nothing needs."""
    graph = Graph("block", io_dtype="float16")
    x, up, down = graph.tensor("x", (48, 64)), graph.tensor("up", (64, 96)), graph.tensor("down", (96, 64))
    hidden = graph.gelu(x @ up, name="hidden")
    graph.exp(hidden, name="unused")
    graph.output(graph.softmax(hidden @ down + x, axis=-1, name="soft").reshape(96, 32), name="y")
    return graph


def test_every_item_is_in_its_kernel_or_says_why_not():
    (found,) = facts(block())["graphs"]
    items = {item["name"]: item for item in found["items"]}
    for number, kernel in enumerate(found["kernels"]):
        assert all(found["items"][row]["kernel"] == number for row in kernel["rows"])
        assert len(kernel["owners"]) == len(kernel["parts"])
        assert set(kernel["owners"]) - {None} <= set(kernel["rows"])
    rows = sorted(row for kernel in found["kernels"] for row in kernel["rows"])
    assert rows == [at for at, item in enumerate(found["items"]) if item["kernel"] is not None]
    assert items["unused"]["state"] == "removed"
    assert items["y"]["state"] == "view"
    assert items["hidden"]["kernel"] == items["matmul"]["kernel"] != items["soft"]["kernel"]


def test_what_kernels_give_each_other_has_its_reason():
    (found,) = facts(block())["graphs"]
    (edge, *_) = [e for e in found["between"] if e["tensor"] == "hidden"]
    assert edge["state"] == "declined"
    assert "are two kernels" in edge["reason"]
    within = {(found["items"][e["from"]]["name"], found["items"][e["to"]]["name"]) for e in found["within"]}
    assert ("matmul", "hidden") in within


def test_figures_are_bytes_and_operations_of_the_kernel():
    graph = Graph("product", io_dtype="float16")
    graph.output(graph.tensor("a", (128, 256)) @ graph.tensor("b", (256, 64), strides=(1, 0)), name="y")
    (kernel,) = facts(graph)["graphs"][0]["kernels"]
    assert kernel["operations"] == 2 * 128 * 256 * 64
    assert kernel["bytes"] == 2 * (128 * 256 + 256 + 128 * 64)  # the elements that strides of 0 repeat are one
    assert kernel["floor_us"] == max(kernel["memory_us"], kernel["compute_us"])
    assert kernel["estimated_us"] >= kernel["memory_us"]


def test_passes_lead_from_the_graph_as_built_to_the_one_with_kernels():
    graph = block()
    made = plan(graph, Options(target=H200))
    passes = facts_of([made], H200, title="block")["graphs"][0]["passes"]
    after = [step["after"] for step in passes["steps"] if step["after"] is not None]
    assert len(passes["built"]) == graph.node_count
    assert len(after[-1]) == made.simplified.node_count
    assert any("unused" in passes["lines"][n] for n in set(passes["built"]) - set(after[-1]))


def test_code_is_marked_whole_and_lines_name_their_nodes():
    found = facts(block())
    for source in found["sources"]:
        assert sum(source["marks"][::2]) == len(source["code"])
    kernel = found["graphs"][0]["kernels"][0]
    source = found["sources"][kernel["source"]]
    for line, parts in source["lines"].items():
        text = source["code"].splitlines()[line - 1]
        names = [kernel["parts"][part].partition(" = ")[0] for part in parts]
        assert all(name in text for name in names)
    assert {part for parts in source["lines"].values() for part in parts} >= {0, 1}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("abcabcabc", [Repeat(0, 3, 3)]),
        ("xabcdabcdy", [Repeat(1, 4, 2)]),
        ("aaaa", [Repeat(0, 1, 4)]),
        ("abab", []),  # two kernels would be folded away: too few
        ("", []),
    ],
)
def test_layers_that_are_alike(keys, expected):
    assert repeats(keys) == expected


def test_cards_do_not_lie_on_each_other_and_lines_go_down():
    heights = {card: 50.0 + 10 * (card % 5) for card in range(60)}
    edges = [(a, b) for a in range(60) for b in (a + 1, a + 4, a + 30) if b < 60 and (a + b) % 3]
    found = placed(heights, edges)
    places = [(*found.cards[card], heights[card]) for card in heights]
    for number, (x, y, height) in enumerate(places):
        for u, v, other in places[:number]:
            apart = abs(x - u) >= WIDTH + GAP - 1 or y >= v + other + LAYER_GAP - 1 or v >= y + height + LAYER_GAP - 1
            assert apart
    for points in found.routes.values():
        assert points[1::2] == sorted(points[1::2])
    assert set(found.routes) == set(edges)


def test_measured_times_take_the_place_of_estimates(tmp_path):
    found = facts(block())
    kernels = found["graphs"][0]["kernels"]
    listed = [{"name": k["name"], "us": 10.0 + n, "start_us": 100.0 * n} for n, k in enumerate(kernels)]
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"kernels": [{"name": "of torch", "us": 1}, *listed]}))
    timed = with_times(found, profile)["graphs"][0]["kernels"]
    assert [k["measured_us"] for k in timed] == [10.0 + n for n in range(len(kernels))]
    assert timed[1]["start_us"] == 100.0
    profile.write_text(json.dumps({"kernels": [*listed, *({**k, "us": k["us"] + 4} for k in listed)]}))
    assert with_times(found, profile)["graphs"][0]["kernels"][0]["measured_us"] == 12.0  # the mean of two calls
    for text in ("[]", "nothing", '{"kernels": [{"name": "other", "us": 1}]}', '{"kernels": [{}]}'):
        profile.write_text(text)
        with pytest.raises(FileError):
            with_times(found, profile)


def test_a_page_is_one_file_whose_data_can_be_read_again(tmp_path):
    found = facts(block())
    page, data = save(found, tmp_path / "page.html"), save(found, tmp_path / "page.json")
    assert load(page)["graphs"] == load(data)["graphs"]
    text = page.read_text()
    assert text.count("<script") == text.count("</script>") == 2
    assert "src=" not in text.partition('id="data"')[0]
    other = tmp_path / "other.html"
    other.write_text("<html></html>")
    with pytest.raises(FileError, match="is no report"):
        load(other)
    other.write_text(json.dumps({**found, "format": 99}))
    with pytest.raises(FileError, match="format 99"):
        load(other)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    found = facts(block())
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(ToolchainError, match=r"fusegraph\[report\]"):
        save(found, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_page_without_registers(tmp_path, monkeypatch):
    def refuse(*arguments, **more):
        raise ToolchainError("no NVRTC here")

    monkeypatch.setattr("fusegraph.report.page.compiled.nvrtc.compile_kernels", refuse)
    graph = Graph("small")
    graph.output(graph.relu(graph.tensor("x", (4, 4))))
    made = plan(graph, Options(target=target("h200")))
    with pytest.warns(UserWarning, match="no registers of kernels: no NVRTC here"):
        page = write([made], target("h200"), tmp_path / "page.json", title="small")
    (source,) = load(page)["sources"]
    assert "registers" not in source


@pytest.mark.slow
def test_what_torch_has_compiled_for_the_cpu_has_registers(tmp_path):
    torch = pytest.importorskip("torch")
    import fusegraph.torch

    fusegraph.torch.report(clear=True)
    run = torch.compile(lambda x: torch.relu(x) + 1, backend="fusegraph")
    run(torch.zeros(64))
    page = fusegraph.torch.report(clear=True).save(tmp_path / "page.json")
    assert all(source["registers"] > 0 for source in load(page)["sources"])


def test_differences_of_two_targets():
    graph = block()
    same = differences(facts(graph), facts(graph), "a", "b")
    assert all("same" in row[3] for table in same["tables"] if table["title"] == "Graph block" for row in table["rows"])
    assert next(t for t in same["tables"] if t["title"] == "Kernels of block")["rows"] == []
    found = differences(facts(graph), facts(graph, "a100"), "a", "b")
    assert ["target", "h200", "a100"] in found["tables"][0]["rows"]
    assert next(t for t in found["tables"] if t["title"] == "Kernels of block")["rows"]


def test_the_command_writes_pages_and_compares_them(tmp_path, capsys):
    first, second = str(tmp_path / "first.html"), str(tmp_path / "second.json")
    assert main(["report", EXAMPLE, "-o", first, "--target", "h200"]) == 0
    assert main(["report", EXAMPLE, "-o", second, "--target", "h200", "--no-fusion", "--no-compile", "--json"]) == 0
    assert [0 < source["registers"] <= 255 for source in load(first)["sources"]] == [True, True]
    assert all("registers" not in source for source in load(second)["sources"])
    items = {item["name"]: item for item in load(first)["graphs"][0]["items"]}
    assert items["conv1"]["place"].startswith("conv_bias_relu.py:")
    capsys.readouterr()
    page = tmp_path / "differences.html"
    assert main(["report", "--diff", first, second, "-o", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "kernels; before 2; after 7" in printed
    assert "fusion; before True; after False" in printed
    assert "not fused any more" in printed
    assert load(page)["differences"]["tables"]
    assert main(["report", first, second]) == 2
    assert main(["report", "--diff", first]) == 2


def test_origins_of_models_are_modules_and_lines():
    trace = 'File "/home/user/net.py", line 12, in forward\n    x = self.conv(x)\n'
    inner = 'File "/usr/lib/python3/site-packages/torch/nn/modules/conv.py", line 5, in forward\n    return f(x)\n'
    found = Origin("L['self']._modules['layer1'][0].conv", "convolution", "aten.convolution.default", trace + inner)
    assert (found.scope, found.place) == ("layer1.0.conv", "net.py:12: x = self.conv(x)")
    assert Origin("/layer1/layer1.0/conv").scope == "layer1.0.conv"
    assert (Origin().scope, Origin().place) == ("", "")
    graph = Graph("lines")
    x = graph.tensor("x", (4, 4))
    with written_for(calling_line):
        y = graph.relu(x + 1)
    graph.output(graph.exp(y))
    places = [graph.origins[node].place if node in graph.origins else None for node in graph.nodes]
    assert [place and place.partition(": ")[2] for place in places] == ["y = graph.relu(x + 1)"] * 2 + [None]


def test_modules_of_torch_and_lines_of_a_model(tmp_path):
    torch = pytest.importorskip("torch")
    import fusegraph.torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))

        def forward(self, x):
            return x + self.layers(x)

    page = fusegraph.torch.explain(Net().eval(), torch.zeros(8, 16), target="h200").save(tmp_path / "net.html")
    (graph, *_) = load(page)["graphs"]
    assert all(source["registers"] > 0 for source in load(page)["sources"])
    items = {item["scope"] or item["name"]: item for item in graph["items"]}
    assert items["layers.1"]["op"] == "gelu"
    assert items["layers.1"]["place"].endswith("return x + self.layers(x)")
    with pytest.raises(FileError, match="nothing to show"):
        fusegraph.torch.Report(()).save(tmp_path / "empty.html")


def test_lines_of_an_exported_model_are_the_users_own(tmp_path):
    """What a command adds by itself, as the vectors of all batch norms at once, is from no line."""
    pytest.importorskip("torch")
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n\n\n"
        "def model() -> torch.export.ExportedProgram:\n"
        "    layers = [layer for n in (3, 8) for layer in (torch.nn.Conv2d(n, 8, 3), torch.nn.BatchNorm2d(8))]\n"
        "    net = torch.nn.Sequential(*layers).eval().requires_grad_(False)\n"
        "    return torch.export.export(net, (torch.zeros(1, 3, 8, 8),))\n"
    )
    assert main(["report", str(file), "-o", str(tmp_path / "page.json"), "--no-compile", "--target", "h200"]) == 0
    (graph, *_) = load(tmp_path / "page.json")["graphs"]
    assert {item["op"] for item in graph["items"]} > {"convolution", "slice"}
    assert {item["place"].partition(":")[0] for item in graph["items"]} <= {"", "model.py"}


def test_nodes_of_onnx(tmp_path):
    onnx = pytest.importorskip("onnx")
    import fusegraph.onnx

    value = onnx.helper.make_tensor_value_info
    shape = (onnx.TensorProto.FLOAT, (4, 8))
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["h"], name="/layer1/layer1.0/act/Relu"),
        onnx.helper.make_node("Add", ["h", "x"], ["y"], name="/layer1/layer1.0/Add"),
    ]
    proto = onnx.helper.make_graph(nodes, "net", [value("x", *shape)], [value("y", *shape)])
    model = fusegraph.onnx.from_proto(onnx.helper.make_model(proto, opset_imports=[onnx.helper.make_opsetid("", 20)]))
    data = load(model.report(tmp_path / "net.json", target="h200"))
    assert all(source["registers"] > 0 for source in data["sources"])
    (graph,) = data["graphs"]
    assert [(item["scope"], item["op"]) for item in graph["items"]] == [("layer1.0.act", "Relu"), ("layer1.0", "Add")]
