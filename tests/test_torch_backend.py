"""The backend of torch.compile: how graphs are cut, what is left to torch, its report, options and errors."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import fusegraph.torch  # noqa: E402
from fusegraph import plan as planning  # noqa: E402
from fusegraph.dtypes import float32  # noqa: E402
from fusegraph.errors import ArgumentError, FileError  # noqa: E402
from fusegraph.frontends.torch import backend, vectors  # noqa: E402
from fusegraph.frontends.torch.cut import Analysis  # noqa: E402
from fusegraph.frontends.torch.decompositions import decompositions  # noqa: E402
from fusegraph.frontends.torch.exported import import_module  # noqa: E402
from fusegraph.frontends.torch.forms import forms_of  # noqa: E402
from fusegraph.frontends.torch.table import HANDLERS, Call, Form, Precision  # noqa: E402
from fusegraph.graph import Graph  # noqa: E402
from fusegraph.loader import load_graphs  # noqa: E402
from fusegraph.plan import plan  # noqa: E402
from fusegraph.runtime.strides import contiguous_strides  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)


class _Module(torch.nn.Module):  # type: ignore[misc]
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def _imported(function: Any, *inputs: Any) -> Any:
    return import_module(_Module(function), *inputs, name="f")


def test_what_stays_torchs_is_not_in_the_table() -> None:
    """The list in `fusegraph.torch`, which the docs show."""
    served = {operator.split(".")[1] for operator in HANDLERS}
    listed = set(re.findall(r"``(\w+)``", (fusegraph.torch.__doc__ or "").partition("stay torch's")[2]))
    assert {"svd", "fft", "nonzero"} <= listed
    assert not listed & served


def _ops(graph: Any) -> list[str]:
    return [node.op.name for node in graph.nodes]


def test_what_torch_computes_is_between_pieces() -> None:
    x = torch.zeros(4, 6)
    made = _imported(lambda x: torch.special.i0(x.relu() + 1).tanh() * x, x)
    assert [_ops(g) for g in made.graphs] == [["relu", "add"], ["tanh", "mul"]]
    assert [reason for _, reason in made.left.values()] == ["not in the table"]
    first, second = made.graphs
    assert len(first.outputs) == 1
    assert [t.shape for t in second.inputs] == [(4, 6), (4, 6)]


@pytest.mark.slow
def test_nodes_on_both_sides_of_torch_are_still_one_piece() -> None:
    """Only what depends on torch's result comes after it."""
    made = _imported(lambda x, y: (torch.special.i0(x.relu()), y.exp().sum(1)), torch.zeros(4, 6), torch.zeros(4, 6))
    assert [sorted(_ops(g)) for g in made.graphs] == [["exp", "reduction", "relu"]]


@pytest.mark.slow
def test_a_cast_goes_with_what_takes_it() -> None:
    """Less is handed over if a weight is cast in the piece of its product than before it."""

    def function(x: Any, w: Any) -> Any:
        return torch.special.i0(x.relu()) @ w.to(torch.float32)

    made = _imported(function, torch.zeros(4, 6), torch.zeros(6, 8, dtype=torch.bfloat16))
    assert [_ops(g) for g in made.graphs] == [["relu"], ["identity", "matmul"]]


def test_views_are_handed_over_as_views() -> None:
    """What torch takes three views of is written once."""

    def function(x: Any, w: Any) -> Any:
        q, k, v = (x @ w).view(2, 5, 3, 8).unbind(2)
        return torch.special.i0(q) + torch.special.i0(k) + torch.special.i0(v)

    made = _imported(function, torch.zeros(2, 5, 16), torch.zeros(16, 24))
    first, second = made.graphs
    assert [t.shape for t in first.outputs] in ([(10, 24)], [(2, 5, 24)])
    assert _ops(second) == ["add", "add"]


@pytest.mark.slow
def test_dtypes_that_we_lack_are_left_to_torch() -> None:
    made = _imported(lambda x: (x.relu(), torch.complex(x, x) * 2), torch.zeros(3))
    assert [_ops(g) for g in made.graphs] == [["relu"]]
    assert any("dtype" in reason for _, reason in made.left.values())


def test_parameters_have_their_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
    made = import_module(model, torch.zeros(2, 8))
    (graph,) = made.graphs
    assert {"0.weight", "0.bias"} <= {t.name for t in graph.inputs}
    assert graph.name == "Sequential"


@pytest.mark.slow
def test_sums_of_products_keep_the_dimensions_of_rows() -> None:
    """What follows a linear layer of three dimensions is in its epilogue: no reshape comes between."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    (graph,) = import_module(model, torch.zeros(2, 5, 8)).graphs
    assert len(plan(graph).kernels) == 2


@pytest.mark.slow
def test_channels_last_stays() -> None:
    model = torch.nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.zeros(2, 4, 6, 6).to(memory_format=torch.channels_last)
    (graph,) = import_module(model, x).graphs
    assert [t.strides for t in graph.outputs] == [(288, 1, 48, 8)]
    assert next(t for t in graph.inputs if t.rank == 4 and t.shape[1:] == (4, 6, 6)).strides == (144, 1, 24, 4)


def test_torchs_settings_decide_on_tf32() -> None:
    assert backend.precision("cpu") == Precision(False, False)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        for convolution in (False, True):
            for matmul in (False, True):
                torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolution, matmul
                assert backend.precision("cuda:0") == Precision(matmul, convolution)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.slow
def test_inputs_are_named_as_the_model_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a saved value has the same name: forward and backward."""
    seen: list[dict[str, tuple[int, ...]]] = []
    original = backend.build

    def recording(*arguments: Any) -> Any:
        made = original(*arguments)
        seen.append({t.name: t.shape for t in made.graph.inputs})
        return made

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mlp = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 2, bias=False))

        def forward(self, addmm: Any) -> Any:
            return self.mlp(addmm)

    monkeypatch.setattr(backend, "build", recording)
    torch.compile(Model(), backend="fusegraph")(torch.ones(4, 3)).sum().backward()
    forward, backward = seen
    assert forward == {"addmm": (4, 3), "mlp_0_weight": (5, 3), "mlp_0_bias": (5,), "mlp_2_weight": (2, 5)}
    assert backward["mlp_2_weight"] == (2, 5)
    assert {(4, 3), (4, 5)} <= set(backward.values()), "the input, and the saved value that torch calls addmm"


@pytest.mark.slow
def test_operators_are_left_to_torch_by_an_option() -> None:
    with torch.no_grad():
        torch.compile(lambda x: x.relu().exp(), backend="fusegraph", options={"leave": ["aten.exp.default"]})(
            torch.ones(3)
        )
    (report,) = fusegraph.torch.report()
    assert report.left == (("exp", "aten.exp.default", "left by an option"),)
    assert report.operators == report.kernels == 1


@pytest.mark.slow
def test_layers_that_torch_separates_share_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    source_of = planning.source_of
    monkeypatch.setattr(planning, "source_of", lambda *given: sources.append(source_of(*given)) or sources[-1])

    def layers(x: Any) -> Any:
        for _ in range(4):
            x = (x.relu() + 1).exp() * 0.5  # torch computes exp
        return x

    x = torch.randn(3, 5)
    with torch.no_grad():
        found = torch.compile(layers, backend="fusegraph", options={"leave": ["aten.exp.default"]})(x)
    torch.testing.assert_close(found, layers(x))
    (report,) = fusegraph.torch.report()
    assert report.kernels == 5
    assert len(sources) == 3, "the first one, the last one, and one for those between"


@pytest.mark.parametrize("how", [{"options": {"speed": 11}}, {"mode": "fastest"}])
def test_unknown_options_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="backend fusegraph has no"):
        fusegraph.torch.backend(None, [], **how)


def test_the_backend_has_a_name() -> None:
    assert "fusegraph" in torch._dynamo.list_backends()


@pytest.mark.slow
def test_a_function_runs_and_is_reported() -> None:
    def function(x: Any, y: Any) -> Any:
        x = x.relu()
        x.add_(1)  # in place, of something of its own
        y.mul_(2)  # in place, of an input
        return torch.special.i0(x) * y, x.t()

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    x2, y2 = x.clone(), y.clone()
    with torch.no_grad():
        got = torch.compile(function, backend="fusegraph")(x, y)
        wanted = function(x2, y2)
    for a, b in zip((*got, x, y), (*wanted, x2, y2)):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    (report,) = fusegraph.torch.report()
    assert report.name == "inference"
    assert {op for _, op, _ in report.left} == {"aten.i0.default"}
    assert report.kernels == 3
    told = report.phases.seconds
    assert list(told) == ["AOTAutograd", "import", "passes", "fusion", "schedules", "rendering", "C++ compiler"]
    assert told["AOTAutograd"] > 0.001
    assert sum(told.values()) - told["AOTAutograd"] <= report.seconds
    assert "  seconds: AOTAutograd 0." in str(report)
    assert report.bytes_saved == report.bytes_unfused - report.bytes_moved > 0
    text = str(fusegraph.torch.report())
    assert "left to torch: i0 = aten.i0.default: not in the table" in text


@pytest.mark.slow
def test_files_of_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.special.i0(x.relu()).tanh()\n"
        "def program() -> torch.export.ExportedProgram:\n"
        "    return torch.export.export(Model(), (torch.zeros(3),))\n"
        "def pair():\n"
        "    return torch.nn.ReLU(), (torch.zeros(3),)\n"
        "named = pair()\n"
        "bare = torch.nn.ReLU(), torch.zeros(3)\n"
    )
    assert [_ops(g) for g in load_graphs(str(file))] == [["relu"], ["tanh"]]
    assert "torch has to compute" in capsys.readouterr().err
    for name in ("pair", "named"):
        assert [g.name for g in load_graphs(f"{file}:{name}")] == [name]
    with pytest.raises(FileError, match=r"type tuple; wanted is .*with a tuple of example inputs"):
        load_graphs(f"{file}:bare")
    file.write_text(file.read_text().replace("(x.relu()).tanh()", "(x)"))
    with pytest.raises(FileError, match="torch has to compute all of program; there is nothing to compile"):
        load_graphs(str(file))


@pytest.mark.slow
def test_factors_of_normalisation_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_MOST", 26)
    layers = [m for _ in range(8) for m in (torch.nn.Conv2d(4, 4, 1, bias=False), torch.nn.BatchNorm2d(4))]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm2d(4, affine=False)).eval()
    (graph,) = import_module(model, torch.zeros(2, 4, 5, 5)).graphs
    assert _ops(graph).count("rsqrt") == 3, "six of a kind, two more, and one without scale and bias"
    made = plan(graph)
    assert made.packing is not None
    assert (len(made.kernels), len(made.packing.kernels)) == (8, 3)


NEAREST = [{"scale_factor": 2.0}, {"size": (9, 7)}, {"scale_factor": (1.0, 1.7)}]
LINEAR = [
    *({**how, "mode": "bilinear"} for how in NEAREST),
    {"size": (9, 1), "mode": "bilinear", "align_corners": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("how", [*NEAREST, *LINEAR])
def test_interpolation_of_programs(how: dict[str, Any]) -> None:
    """torch.export keeps the operators that torch.compile writes out."""

    x = torch.randn(2, 3, 5, 4)
    imported = _imported(lambda x: torch.nn.functional.interpolate(x, **how), x)
    (graph,) = imported.graphs
    assert not imported.left
    assert "mode" in how or {node.op.name for node in graph.nodes} == {"gather"}
    torch.testing.assert_close(graph.compile("reference")(x), torch.nn.functional.interpolate(x, **how))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_normalisation_by_known_statistics_is_a_piece_with_its_gradient(device: str, dtype: Any) -> None:
    """On CUDA torch gives the statistics back, to keep them for a gradient that does not look at them."""
    aten = torch.ops.aten

    def step(x: Any, scale: Any, bias: Any, mean: Any, variance: Any, loss: Any, *, names: Any) -> Any:
        forward, backward, more = names
        y, *saved = forward(x, scale, bias, mean, variance, 0.1, 1e-5)
        how = (mean, variance, *saved[:2], False, 1e-5, [True, True, True], *saved[2 : 2 + more])
        return y.relu(), *saved[:2], *backward(loss, x, scale, *how)

    with torch._subclasses.FakeTensorMode():
        images = [torch.empty(2, 4, 5, 5, device=device, dtype=dtype) for _ in range(2)]
        vectors = [torch.empty(4, device=device) for _ in range(4)]
        for names in (
            (aten._native_batch_norm_legit_no_training, aten.native_batch_norm_backward, 0),
            (aten._batch_norm_no_update, aten.batch_norm_backward, 1),
        ):
            function = functools.partial(step, names=names)
            rules = dict(decompositions())
            traced = make_fx(function, decomposition_table=rules)(images[0], *vectors, images[1])
            cut, graphs = backend.in_pieces(Analysis(traced.graph, forms_of(traced.graph, {})), "step")
            assert not cut.left
            assert len(graphs) == 1
            (graph,) = graphs.values()
            assert len(graph.outputs) == len(traced.graph.output_node().args[0])


def test_statistics_given_back_are_those_that_were_known() -> None:
    graph = Graph("norm")
    x = graph.tensor("x", (2, 4, 5, 5))
    mean, variance = (graph.tensor(name, (4,)) for name in ("mean", "variance"))
    forms = [Form(shape, contiguous_strides(shape), float32, "cuda:0") for shape in ((2, 4, 5, 5), (4,), (4,))]
    call = Call(graph, tuple(forms), Precision(), frozenset((0, 1, 2)))
    handler = HANDLERS["aten._native_batch_norm_legit_no_training.default"]
    for result in handler(call, x, None, None, mean, variance, 0.1, 1e-3):
        graph.output(result)
    inputs = torch.randn(2, 4, 5, 5), torch.randn(4), torch.rand(4)
    y, kept, inverse = graph.compile("reference")(*inputs)
    torch.testing.assert_close(y, torch.nn.functional.batch_norm(inputs[0], *inputs[1:], eps=1e-3))
    torch.testing.assert_close((kept, inverse), (inputs[1], (inputs[2] + 1e-3).rsqrt()))


@pytest.mark.slow
def test_what_torch_returns_in_another_dtype_than_it_says_is_converted() -> None:
    """A batch norm in bfloat16 with a momentum that fusegraph refuses: torch computes it, with statistics in float32 to
    the tracer, and in bfloat16 in truth.
    """
    x, mean, variance = torch.randn(3, 4, 5).bfloat16(), torch.zeros(4).bfloat16(), torch.ones(4).bfloat16()

    def function(x: Any, mean: Any, variance: Any) -> Any:
        y, *saved, mean, variance = torch.ops.aten._native_batch_norm_legit_functional(
            x, None, None, mean, variance, True, -1.0, 1e-5
        )
        return y * 2, *(v * 2 for v in (*saved, mean, variance))

    with torch.no_grad():
        got = torch.compile(function, backend="fusegraph")(x, mean, variance)
        wanted = function(x, mean, variance)
    (report,) = fusegraph.torch.report()
    assert {op for _, op, _ in report.left} == {"aten._native_batch_norm_legit_functional.default"}
    torch.testing.assert_close(got, wanted, check_dtype=False)


@pytest.mark.slow
def test_assertions_about_what_tracing_has_fixed_are_dropped() -> None:
    def function(x: Any) -> Any:
        y = x.relu()
        torch.ops.aten._assert_tensor_metadata(y, None, None, torch.float32)
        return y.to(torch.bfloat16).float() * 2

    for made in (_imported(function, torch.zeros(4, 6)), _imported(lambda x: x.double() + 1, torch.zeros(4, 6))):
        assert not made.left
        assert len(made.graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"label_smoothing": 0.1}, {"reduction": "none", "ignore_index": 3}])
def test_cross_entropy_of_a_product_is_written_out(how: dict[str, Any]) -> None:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        pytest.skip("this torch has no linear_cross_entropy")
    rows, weight, target = torch.randn(6, 8), torch.randn(10, 8), torch.arange(6)
    made = _imported(lambda *inputs: function(*inputs, **how), rows, weight, target)
    assert not made.left
    (graph,) = made.graphs
    got = graph.compile("reference")(*(dict(zip("xwt", (rows, weight, target)))[k] for k in "xwt"))
    torch.testing.assert_close(got, function(rows, weight, target, **how))
