"""Graphs that `from_cudnn` has read, run as a pygraph is: by uids, tensors and names, on the cpu engine and cuDNN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_cudnn_answers import ACCEPTED, described
from test_from_cudnn import DATA, cudnn, empty, fma, nhwc, normal, pygraph

import fusegraph as fg
from fusegraph.errors import ArgumentError, FileError, NotSupportedError, ShapeError
from fusegraph.frontends.cudnn import from_cudnn
from fusegraph.loader import load_graphs
from fusegraph.report.check import compare, laid_out, placed, random_inputs, rounding_of, run


def test_arrays_by_uid_tensor_or_name_in_any_shape_that_lies_alike():
    g, (_, w, _, y) = fma()
    graph = from_cudnn(g)
    a, c, d = normal((6, 8)), normal((1, 8, 4), seed=1), normal((4,), seed=2)
    out = np.empty((24,), np.float32)
    graph.build(engine="reference")
    graph.execute({7: a, w: c, "b": d, y: out, 1000: None, None: a}, workspace=None)
    np.testing.assert_allclose(out.reshape(6, 4), np.maximum(a @ c[0] + d, 0), rtol=1e-6)
    assert [t.name for t in graph.outputs] == ["y"]
    assert graph.get_workspace_size() == 0
    wrong: list[tuple[dict[Any, Any], str]] = [
        ({7: a, w: c, y: out}, r"graph 'users' needs an array for 'b' \(uid "),
        ({7: a.T.copy().T, w: c, "b": d, y: out}, r"'x' of graph 'users' has shape \[1, 6, 8\] and strides \[48, 8"),
        ({7: a, w: c, "b": d, y: out[:20]}, r"'y' of graph 'users' lies in 24 elements of memory"),
        ({7: a, w: c, "b": d.astype(np.float16), y: out}, r"'b' of graph 'users' has dtype float32, got float16"),
        ({7: a, w: c, "bias": d, y: out}, r"has no one tensor named 'bias'; it has"),
        ({7: a, w: c, (1,): d, y: out}, r"by uid, tensor or name, not by tuple"),
    ]
    for pack, reason in wrong:
        with pytest.raises(ArgumentError, match=reason):
            graph.execute(pack)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_addresses_as_cudnn_takes_them(engine):
    """Of memory on the host, for engines that run there."""
    g, (_, w, b, y) = fma()
    graph = from_cudnn(g)
    graph.build(engine=engine)
    a, c, d = normal((1, 6, 8)), normal((1, 8, 4), seed=1), normal((1, 1, 4), seed=2)
    out = np.full((1, 6, 4), np.nan, np.float32)
    graph.execute({7: a.ctypes.data, w: np.uint64(c.ctypes.data), b: d, y: out.ctypes.data})
    np.testing.assert_allclose(out, np.maximum(a @ c + d, 0), rtol=1e-6, atol=1e-6)
    graph.execute({7: 2 * a, w: c, b: d.ctypes.data, y: out.ctypes.data})
    np.testing.assert_allclose(out, np.maximum(2 * a @ c + d, 0), rtol=1e-6, atol=1e-6)
    for address, reason in (
        (0, r"'w' of graph 'users' is 128 bytes of memory, which 0 is no address of"),
        (-64, "which -64 is no address of"),
        (2**64 - 64, "is no address of"),
        (c.ctypes.data + 2, r"'w' of graph 'users' has dtype float32, whose addresses are multiples of 4; got 0x"),
        (True, "'w'"),
        (4096.0, "'w'"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            graph.execute({7: a, w: address, b: d, y: out})
    with pytest.raises(ArgumentError, match=r"output 'y' of graph 'users' overlaps input 'x'"):
        graph.execute({7: out.ctypes.data, w: c, b: d, y: out.ctypes.data})


@pytest.mark.parametrize("built", [False, True])
def test_shapes_of_a_call(built):
    """Those of inputs and outputs; what lies between them, and was inferred, follows."""
    g = cudnn.pygraph(
        name="users", io_data_type=DATA.FLOAT, compute_data_type=DATA.FLOAT, is_override_shape_enabled=True
    )
    x = g.tensor([2, 4, 6, 6], nhwc(2, 4, 6, 6), name="x")
    w = g.tensor([8, 4, 3, 3], nhwc(8, 4, 3, 3), name="w")
    b = g.tensor([1, 8, 1, 1], name="b")
    y = g.relu(g.add(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), b), name="y").set_output(True)
    if built:  # what was inferred is shown
        for node in g.nodes:
            for t in node.outputs.values():
                t.dim, t.stride = [2, 8, 6, 6], nhwc(2, 8, 6, 6)
        g._cpp_bog_done = True
    graph = from_cudnn(g)
    graph.build(engine="reference")
    weight, bias = normal((8, 3, 3, 4), seed=1).transpose(0, 3, 1, 2), normal((1, 8, 1, 1), seed=2)

    def run_at(n: int, size: int, **others: Any) -> None:
        image = normal((n, size, size, 4)).transpose(0, 3, 1, 2)
        out = np.empty((n, size, size, 8), np.float32).transpose(0, 3, 1, 2)
        graph.execute({x: image, "w": weight, graph.uids[b.uid]: bias, y.uid: out}, **others)
        padded = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        expected = np.einsum("nchwrs,kcrs->nkhw", windows.astype(np.float64), weight.astype(np.float64)) + bias
        np.testing.assert_allclose(out, np.maximum(expected, 0), rtol=1e-5, atol=1e-5)

    run_at(2, 6)
    for n, size in ((5, 9), (1, 1), (5, 9), (2, 6)):
        shapes, strides = ([f(n, c, size, size) for c in (4, 8)] for f in (lambda *s: list(s), nhwc))
        run_at(n, size, override_uids=[x.uid, y.uid], override_shapes=shapes, override_strides=strides)
    run_at(2, 6)
    wrong: list[tuple[Any, Any, Any, type[Exception], str]] = [
        ([x.uid], [[1, 4, 6, 6]], [], ArgumentError, "three lists of one length"),
        ([x.uid], [[1, 4, 6, 6]], None, ArgumentError, "three lists of one length"),
        (
            [x.uid],
            [[2, 4, 6]],
            [nhwc(2, 4, 6, 6)],
            NotSupportedError,
            r"its stride .* has not as many numbers as its dim",
        ),
        ([x.uid], [[1, 4, 6, "x"]], [nhwc(1, 4, 6, 6)], ArgumentError, "integers"),
        ([777], [[1, 4, 6, 6]], [nhwc(1, 4, 6, 6)], ArgumentError, "no tensor of uid 777"),
        ([x.uid], [[1, 5, 6, 6]], [nhwc(1, 5, 6, 6)], ShapeError, "conv_fprop"),
        ([y.uid], [[2, 8, 7, 7]], [nhwc(2, 8, 7, 7)], ShapeError, r"OUT_0 was set to \[2, 8, 7, 7\]"),
    ]
    for uids, shapes, strides, error, reason in wrong:
        with pytest.raises(error, match=reason):
            run_at(2, 6, override_uids=uids, override_shapes=shapes, override_strides=strides)
    fixed, (a, *_) = fma()
    with pytest.raises(ArgumentError, match="is_override_shape_enabled"):
        from_cudnn(fixed).execute({}, None, None, [a.uid], [[1, 6, 8]], [[48, 8, 1]])


def test_booleans_may_be_bytes():
    """In and out, in the tensor's shape or another; other bytes than cuDNN's are refused."""
    g = pygraph()
    x, m = g.tensor([2, 3, 4], name="x"), g.tensor([2, 3, 4], name="m", data_type=DATA.BOOLEAN)
    chosen = g.mul(x, m, name="chosen").set_output(True)
    flags = g.cmp_gt(x, g.mul(x, x), name="flags").set_output(True).set_data_type(DATA.BOOLEAN)
    graph = from_cudnn(g)
    graph.build(engine="reference")
    a, mask = normal((2, 3, 4)), np.arange(24, dtype=np.uint8) % 2
    y, found = np.empty((2, 3, 4), np.float32), np.full((2, 3, 4), 7, np.uint8)
    for given in (mask, mask.reshape(2, 3, 4), mask.astype(bool).reshape(2, 3, 4)):
        graph.execute({x: a, m: given, chosen: y, flags: found})
        np.testing.assert_array_equal(y, a * mask.reshape(2, 3, 4))
        np.testing.assert_array_equal(found, (a > a * a).astype(np.uint8))
    with pytest.raises(ArgumentError, match=r"'m' of graph 'users' has dtype bool, (got|the graph)"):
        graph.execute({x: a, m: mask.astype(np.int8), chosen: y, flags: found})


def test_arrays_given_when_the_graph_was_built():
    torch = pytest.importorskip("torch")
    g = pygraph()
    a, b = torch.rand(3, 4, 5), torch.rand(3, 5, 2)
    y = g.matmul(a, b).set_output(True).set_data_type(DATA.FLOAT)
    graph = from_cudnn(g)
    out = torch.empty(3, 4, 2)
    graph.build(engine="reference")
    graph.execute({y: out})
    torch.testing.assert_close(out, a @ b)


@pytest.mark.slow
def test_runs_as_kernels():
    """On the cpu engine, as a pygraph is run, line by line."""
    g, (x, w, b, y) = fma()
    h = g.mul(y, g.tensor([1, 1, 1], data_type=DATA.FLOAT, is_pass_by_value=True, name="factor"))
    h.set_output(True).set_name("h")
    graph = from_cudnn(g)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build(engine="cpu")
    a, c, d = normal((6, 8)), normal((8, 4), seed=1), normal((4,), seed=2)
    first, second = np.empty((6, 4), np.float32), np.empty((6, 4), np.float32)
    for factor in (2.0, np.float32(0.5)):
        graph.execute({x: a, w: c, b: d, y: first, "h": second, "factor": factor})
        np.testing.assert_allclose(first, np.maximum(a @ c + d, 0), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(second, first * np.float32(factor))
    assert len(graph.build().plan.kernels) == 1


def test_files_may_hold_pygraphs(tmp_path):
    file = tmp_path / "graphs.py"
    file.write_text(
        "import cudnn\n"
        "users = cudnn.pygraph(name='users', io_data_type=cudnn.data_type.HALF)\n"
        "users.relu(users.tensor([2, 3, 4], name='x')).set_output(True)\n"
        "def build():\n    return users\n"
        "broken = 3\n"
    )
    (graph,) = load_graphs(str(file))
    assert (graph.name, [n.op.name for n in graph.nodes]) == ("users", ["relu"])
    assert load_graphs(f"{file}:users")[0].inputs[0].dtype == fg.float16
    assert load_graphs(f"{file}:build")[0].name == "users"
    with pytest.raises(FileError, match=r"'broken' of .* has type int"):
        load_graphs(f"{file}:broken")


# ---- on a GPU: cuDNN's own execute, and ours


@pytest.mark.gpu
@pytest.mark.parametrize("row", ACCEPTED, ids=lambda row: row.name.replace(" ", "_"))
def test_runs_as_cudnn_runs_it(row):
    """The pygraph that cuDNN runs, read before it is built: both within the bounds of the same reference."""
    graph = row.graph()
    told = described(graph)
    read = from_cudnn(told.pygraph, told.scalars)
    inputs = random_inputs(graph, 3)
    theirs = graph.compile("cudnn")
    checks = list(compare(graph, inputs, run(theirs, inputs), rounding_of(theirs), slack=row.slack))
    executable = read.build(engine="cuda")
    given = {t.name: laid_out(inputs[t.name].reshape(t.shape), t) for t in read.inputs}
    uids = {t: uid for uid, t in read.uids.items() if t in (*read.inputs, *read.outputs)}
    arrays = {t: placed(given[t.name] if t.name in given else empty(t), executable.device) for t in uids}
    read.execute({uids[t]: array for t, array in arrays.items()})
    outputs = {t.name: arrays[t].to_numpy() for t in read.outputs}
    checks += compare(read, given, outputs, rounding_of(executable))
    assert all(c.ok for c in checks), checks


@pytest.mark.gpu
def test_a_users_graph_on_both():
    """One pack of torch's arrays, cuDNN's execute and ours."""
    torch = pytest.importorskip("torch")
    handle = cudnn.create_handle()
    g = pygraph(DATA.HALF, handle=handle)
    x = g.tensor([8, 64, 28, 28], nhwc(8, 64, 28, 28), name="x")
    w = g.tensor([64, 64, 3, 3], nhwc(64, 64, 3, 3), name="w")
    b = g.tensor([1, 64, 1, 1], [64, 1, 64, 64], name="b")
    y = g.relu(g.add(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), b)).set_output(True)
    ours = from_cudnn(g)
    modes = cudnn.heur_mode
    g.build([modes.A, modes.FALLBACK])
    last = {"memory_format": torch.channels_last, "device": "cuda", "dtype": torch.float16}
    pack = {t: torch.randn(t.get_dim()).to(**last) for t in (x, w, b)}
    found, wanted = (torch.empty([8, 64, 28, 28], **last) for _ in range(2))
    workspace = torch.empty(max(g.get_workspace_size(), 1), device="cuda", dtype=torch.uint8)
    g.execute({**pack, y: wanted}, workspace, handle=handle)
    ours.execute({**pack, y: found}, workspace, handle=handle)
    assert ours.uids[y.get_uid()].strides == tuple(y.get_stride())  # as cuDNN inferred them
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-2)
