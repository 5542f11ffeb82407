"""moe_grouped_matmul and its gradient as `from_cudnn` reads them, against a loop over the experts in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import slow
from test_from_cudnn import DATA, cudnn, empty, normal

from fusegraph.errors import NotSupportedError, ShapeError
from fusegraph.frontends.cudnn import from_cudnn

MODE = cudnn.moe_grouped_matmul_mode
TYPES = {"HALF": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "FLOAT": np.float32}
GROUPS = {
    "ragged": [0, 3, 4, 9],
    "some empty": [0, 0, 5, 5],
    "all with the last": [0, 0, 0, 0],
    "none with the last": [0, 2, 13, 13],
}


def forward(dtype: str, starts: list[int], rows: int, k: int, n: int, *, ends: bool, gathered: int = 0) -> Any:
    """Returns a pygraph of a grouped product of all rows, or of ``gathered`` rows by index.

    Its tensors are named token, weight, offsets, index and y.
    """
    g = cudnn.pygraph(
        io_data_type=getattr(DATA, dtype), intermediate_data_type=DATA.FLOAT, compute_data_type=DATA.FLOAT
    )
    experts = len(starts)
    token = g.tensor([1, rows, k], name="token")
    weight = g.tensor([experts, k, n], [k * n, 1, k], name="weight")
    offsets = g.tensor([experts + ends, 1, 1], name="offsets", data_type=DATA.INT32)
    index = g.tensor([1, gathered, 1], name="index", data_type=DATA.INT32) if gathered else None
    y = g.moe_grouped_matmul(token, weight, offsets, index, mode=MODE.GATHER if gathered else MODE.NONE, name="moe")
    y.set_output(True).set_data_type(getattr(DATA, dtype)).set_name("y")
    return g


def loop(token: Any, weight: Any, starts: list[int]) -> Any:
    """Multiplies each group of rows with its expert's weights, independently of the other groups."""
    found = np.zeros((1, token.shape[1], weight.shape[2]))
    for e, (first, end) in enumerate(zip(starts, [*starts[1:], token.shape[1]])):
        with np.errstate(all="ignore"):
            found[0, first:end] = token[0, first:end].astype(np.float64) @ weight[e].astype(np.float64)
    return found


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("ends", [False, True], ids=["starts", "boundaries"])
def test_groups(groups, ends):
    starts, rows = GROUPS[groups], 13
    graph = from_cudnn(forward("FLOAT", starts, rows, 8, 6, ends=ends))
    token, weight = normal((1, rows, 8)), normal((4, 6, 8), seed=1).transpose(0, 2, 1)
    y = np.full((1, rows, 6), np.nan, np.float32)
    graph.build(engine="reference")
    offsets = np.array([*starts, rows][: len(starts) + ends], np.int32)
    graph.execute({"token": token, "weight": weight, "offsets": offsets, "y": y})
    np.testing.assert_allclose(y, loop(token, weight, starts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "k", "n"), [(70, 33, 17), (1, 1, 1), *slow((13, 8, 6))])
def test_on_kernels(dtype, rows, k, n):
    """Weights that are not finite reach none but their expert's rows."""
    starts = [0, rows // 3, rows // 2, rows // 2]
    graph = from_cudnn(forward(dtype, starts, rows, k, n, ends=False))
    graph.build(engine="cpu")
    token, weight = normal((1, rows, k), TYPES[dtype]), normal((4, n, k), TYPES[dtype], 1).transpose(0, 2, 1)
    weight[1, 0, 0], weight[2, 0, 0] = np.nan, np.inf
    y = empty(graph.outputs[0])
    graph.execute({"token": token, "weight": weight, "offsets": np.array(starts, np.int32), "y": y})
    step = 2e-6 if dtype == "FLOAT" else 2 * float(ml_dtypes.finfo(TYPES[dtype]).eps)
    expected = loop(token, weight, starts)
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=step, atol=step * 4)
    assert np.isfinite(y[0, starts[3] :].astype(np.float32)).all()


def test_rows_by_number():
    index, starts = np.array([4, 0, 4, 2, 1, 6, 6, 6, 3], np.int32), [0, 2, 3]
    graph = from_cudnn(forward("HALF", starts, 7, 16, 8, ends=True, gathered=9))
    token, weight = normal((1, 7, 16), np.float16), normal((3, 8, 16), np.float16, 1).transpose(0, 2, 1)
    y = np.empty((1, 9, 8), np.float16)
    graph.build(engine="cpu")
    pack = {"token": token, "weight": weight, "offsets": np.array([*starts, 9], np.int32), "index": index, "y": y}
    graph.execute(pack)
    np.testing.assert_allclose(y, loop(token[:, index], weight, starts), rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_gradient_by_the_weights(dtype, engine):
    """Rows that are not finite reach none but their expert's; an expert without rows has zeros."""
    rows, k, n, starts = 29, 24, 10, [0, 11, 11, 12]
    kind = getattr(DATA, dtype)
    g = cudnn.pygraph(io_data_type=kind, intermediate_data_type=DATA.FLOAT, compute_data_type=DATA.FLOAT)
    loss, token = g.tensor([1, rows, n], name="loss"), g.tensor([1, rows, k], name="token")
    offsets = g.tensor([4, 1, 1], name="offsets", data_type=DATA.INT32)
    dweight = g.moe_grouped_matmul_bwd(loss, token, offsets, name="moe")
    dweight.set_output(True).set_data_type(kind).set_name("dweight")
    graph = from_cudnn(g)
    assert graph.outputs[0].strides == (k * n, 1, k)
    graph.build(engine=engine)
    x, dy, dw = normal((1, rows, k), TYPES[dtype]), normal((1, rows, n), TYPES[dtype], 1), empty(graph.outputs[0])
    x[0, 11, 3], dy[0, 11, 2] = np.inf, np.nan
    graph.execute({"loss": dy, "token": x, "offsets": np.array(starts, np.int32), "dweight": dw})
    wide, loss64 = x[0].astype(np.float64), dy[0].astype(np.float64)
    with np.errstate(all="ignore"):
        expected = [wide[a:b].T @ loss64[a:b] for a, b in zip(starts, [*starts[1:], rows])]
    step = 1e-5 if dtype == "FLOAT" else 2 * float(ml_dtypes.finfo(TYPES[dtype]).eps)
    np.testing.assert_allclose(dw.astype(np.float64), np.stack(expected), rtol=step, atol=step * 4)
    assert not dw[1].astype(np.float32).any()


def test_what_is_refused():
    g = forward("HALF", [0, 1, 2], 7, 16, 8, ends=False)
    g.nodes[0].params["mode"] = MODE.COMBINE
    with pytest.raises(NotSupportedError, match="moe_grouped_matmul 'moe': mode COMBINE"):
        from_cudnn(g)
    g = forward("HALF", [0, 1, 2], 7, 16, 8, ends=False)
    g.nodes[0].inputs["first_token_offset"].dim = [6, 1, 1]
    with pytest.raises(NotSupportedError, match=r"first_token_offset \[6, 1, 1\] for 3 experts"):
        from_cudnn(g)
    g = forward("HALF", [0, 1, 2], 7, 16, 8, ends=False)
    g.nodes[0].inputs["token"].dim, g.nodes[0].inputs["token"].stride = [7, 16], [16, 1]
    with pytest.raises(ShapeError, match=r"'token' \[7, 16\] has three dimensions"):
        from_cudnn(g)
