"""Images between convolutions lie with their channels last; what users see lies as they say."""

import numpy as np
import pytest
from graphs import quick

import fusegraph as fg
from fusegraph.layout import layout_strides
from fusegraph.passes.image_layouts import lay_out_images
from fusegraph.plan import plan

RNG = np.random.default_rng(7)


def _network(shape=(2, 16, 9, 7), *, dtype="float32", last="relu"):
    """A residual block with a pool, a concatenation and a slice between its convolutions."""
    graph = fg.Graph("block", io_dtype=dtype)
    x = graph.tensor("x", shape, dtype)
    w1, w2, w3 = (graph.tensor(f"w{n}", (16, c, 3, 3), dtype) for n, c in ((1, 16), (2, 16), (3, 24)))
    a = graph.relu(graph.conv_fprop(x, w1, padding=1), name="a")
    b = graph.conv_fprop(a, w2, padding=1, name="b")
    pooled = graph.max_pool(b, window=3, stride=1, padding=1, name="pooled")
    joined = graph.concatenate([pooled, graph.slice(a, (0, 0, 0, 0), (2, 8, 9, 7), name="part")], axis=1, name="joined")
    y = graph.conv_fprop(joined, w3, padding=1, name="c")
    graph.output(graph.relu(y, name="y") if last == "relu" else graph.reshape(y, (2, -1), name="y"))
    return graph


def _strides(graph):
    return {t.name: t.strides for t in lay_out_images(graph).graph.tensors.values()}


def test_what_is_between_convolutions_has_its_channels_last():
    found = _strides(_network())
    for name, channels in (("a", 16), ("b", 16), ("pooled", 16), ("joined", 24)):
        assert found[name] == layout_strides((2, channels, 9, 7), "channels_last"), name


def test_inputs_and_outputs_stay_as_they_are():
    found = _strides(_network())
    for name in ("x", "y"):
        assert found[name] == layout_strides((2, 16, 9, 7), "NCHW"), name


def test_an_image_that_is_only_read_as_rows_stays():
    """Channels first, a flattened image is a view; channels last it would be a copy."""
    assert _strides(_network(last="reshape"))["c"] == layout_strides((2, 16, 9, 7), "NCHW")


def test_few_channels_are_no_vector():
    graph = fg.Graph("thin")
    x, w, v = graph.tensor("x", (1, 8, 5, 5)), graph.tensor("w", (3, 8, 1, 1)), graph.tensor("v", (8, 3, 1, 1))
    graph.output(graph.conv_fprop(graph.conv_fprop(x, w, name="thin"), v))
    assert _strides(graph)["thin"] == layout_strides((1, 3, 5, 5), "NCHW")


def test_depthwise_convolutions_read_and_write_planes_where_that_is_faster():
    """A result that is written as planes would be turned: neighbouring channels are far apart."""
    for layout, turned in (("NCHW", False), ("NHWC", True)):
        graph = fg.Graph("depthwise", io_dtype="bfloat16")
        x, w = graph.tensor("x", (2, 352, 112, 112), layout="NCHW"), graph.tensor("w", (352, 1, 5, 5))
        y = graph.conv_fprop(graph.tanh(x, name="a"), w, padding=2, groups=352, name="b")
        graph.output(y + graph.tensor("residual", y.shape, layout=layout), name="y", layout=layout)
        (choice,) = lay_out_images(graph).choices
        assert choice.taken == ("made" if turned else "left"), choice
        assert (_strides(graph)["a"] == layout_strides(x.shape, "channels_last")) == turned


def test_graphs_without_convolutions_are_left_alone():
    graph = fg.Graph("plain")
    x = graph.tensor("x", (2, 16, 4, 4))
    graph.output(graph.exp(graph.relu(x)))
    assert lay_out_images(graph).graph is graph


@pytest.mark.parametrize("dtype", quick("bfloat16", "float32"))
@pytest.mark.parametrize("last", ["relu", "reshape"])
def test_results_are_those_of_the_reference(dtype, last):
    graph = _network(dtype=dtype, last=last)
    fed = {t.name: RNG.standard_normal(t.shape).astype(np.float32) for t in graph.inputs}
    if dtype == "bfloat16":
        import ml_dtypes

        fed = {name: value.astype(ml_dtypes.bfloat16) for name, value in fed.items()}
    expected = fg.compile(graph, engine="reference")(**fed)
    got = fg.compile(graph, engine="cpu")(**fed)
    scale = np.abs(np.asarray(expected, np.float64)).max()
    error = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64)).max() / scale
    assert error < (3e-2 if dtype == "bfloat16" else 1e-5)


def test_convolutions_read_and_write_channels_last():
    kernels = plan(_network(dtype="bfloat16")).kernels
    images = {t.name: t for k in kernels for t in (*k.group.reads, *k.group.writes)}
    assert all(images[name].strides[1] == 1 for name in ("a", "b", "pooled"))
