"""Results of the Hopper form that threads carry to rows which begin anywhere, or that are turned for planes."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import Case, check_cases
from test_contraction import convolution, matmul
from test_contraction_wgmma import channel_bias, hopper, image, in_pingpong, shape

import fusegraph as fg


def odd(m: int, n: int, k: int, dtype: Any = "bfloat16", second: Any = None, **more: Any) -> Case:
    """Returns a product whose operands have tensor maps, while the rows of its result have any length."""
    return matmul((m, k), (k, n), dtype, second, b_strides=(1, k), **more)


def stored(dtype: str, strides: Any = None, **attributes: Any) -> Any:
    def epilogue(graph: fg.Graph, y: fg.Tensor) -> None:
        out = graph.output(graph.cast(y, dtype), name="y")
        if strides is not None:
            out.strides = strides

    return epilogue


def biased(graph: fg.Graph, y: fg.Tensor) -> None:
    graph.output(graph.relu(y + graph.tensor("bias", (y.shape[-1],))), name="y", dtype=y.dtype)


def residual(graph: fg.Graph, y: fg.Tensor) -> None:
    """Adds an operand with unaligned rows, and one that does not vary along them."""
    z = y * graph.tensor("scale", (*y.shape[:-1], 1), "float32") + graph.tensor("residual", y.shape, y.dtype)
    graph.output(graph.relu(z + graph.tensor("bias", (y.shape[-1],))), name="y", dtype=y.dtype)


def two_outputs(graph: fg.Graph, y: fg.Tensor) -> None:
    """Rows of 4 and of 1 byte an element, and an operand as long as the rows."""
    z = y + graph.tensor("residual", y.shape, "bfloat16")
    graph.output(graph.relu(z), name="first", dtype="float32")
    graph.output(z > 0.0, name="second")


def nchw(graph: fg.Graph, y: fg.Tensor) -> None:
    graph.output(graph.relu(y), name="y", layout="contiguous")


def carried(cases: list[Case]) -> None:
    for exe in check_cases(cases, guard=True):
        assert "carry_row<" in exe.plan.kernels[0].source.code


def test_rows_that_begin_anywhere():
    made = check_cases([hopper(odd(70, 141, 24, epilogue=residual), shape(1, 128))], guard=True)
    source = made[0].plan.kernels[0].source.code
    assert "carry_row<128>" in source
    assert "fetch_row<128>" in source


@pytest.mark.slow
def test_rows_of_every_dtype_and_length():
    cases = [hopper(odd(70, 77, 24, epilogue=biased), shape(1, 64)), hopper(odd(9, 70, 16, epilogue=two_outputs))]
    cases += [hopper(odd(200, 333, 72, "float16", epilogue=residual), in_pingpong(), blocks=1, pingpong=True)]
    cases += [hopper(odd(3, 5, 16, epilogue=residual)), hopper(odd(150, 77, 2048, epilogue=residual), shape(split_k=2))]
    cases += [hopper(odd(67, n, 16)) for n in (3, 7, 33, 65)]
    cases += [
        hopper(odd(131, 45, 32, "float8_e4m3", epilogue=stored(dtype)))
        for dtype in ("float8_e5m2", "bool", "float16", "float32")
    ]
    cases += [hopper(odd(65, 45, 32, "int8", epilogue=stored(dtype))) for dtype in ("int8", "int32")]
    cases.append(hopper(odd(65, 48, 16, epilogue=stored("bfloat16", (51, 1)))))
    cases += [hopper(odd(300, 147, 72, epilogue=two_outputs), in_pingpong(64), blocks=2, pingpong=True)]
    cases += [hopper(odd(130, 77, 2048, epilogue=biased), shape(split_k=2))]
    carried(cases)


@pytest.mark.slow
def test_images_of_an_odd_number_of_pixels():
    """Results that are contiguous along rows, 7 x 7 or 5 x 3 at a time."""
    cases = [
        hopper(image((5, 64, 7, 7), (40, 64, 3, 3), padding=1, epilogue=nchw)),
        hopper(image((9, 64, 5, 3), (33, 64, 1, 1), epilogue=nchw), shape(3)),
        hopper(image((1, 64, 9, 9), (72, 64, 1, 1), "float16", epilogue=nchw), in_pingpong(), blocks=1, pingpong=True),
    ]
    for exe in check_cases(cases, guard=True):
        assert "load_results<1" in exe.plan.kernels[0].source.code


def nchw_residuals(graph: fg.Graph, y: fg.Tensor) -> None:
    """Adds operands that lie as the results do, one that differs by channel, and one by position."""
    z = y * graph.tensor("scale", (1, y.shape[1], *(1 for _ in y.shape[2:])), "float32")
    z = z + graph.tensor("residual", y.shape, y.dtype) * graph.tensor("other", y.shape, y.dtype)
    z = z + graph.tensor("place", (1, 1, *y.shape[2:]), y.dtype)
    graph.output(graph.relu(z), name="y", dtype=y.dtype, layout="contiguous")


def nchw_halves(graph: fg.Graph, y: fg.Tensor) -> None:
    """Has outputs of two dtypes, each with room for an operand of its own."""
    z = y + graph.tensor("residual", y.shape, "bfloat16") + graph.tensor("wide", y.shape, "float32")
    graph.output(z, name="first", dtype="float32", layout="contiguous")
    graph.output(graph.relu(z), name="second", dtype="bfloat16", layout="contiguous")


def test_operands_of_odd_images_take_the_places_of_results():
    tf32 = {"compute_dtype": "tf32", "epilogue": nchw_residuals}
    cases = [
        hopper(image((3, 64, 7, 5), (40, 64, 1, 1), "float32", **tf32), shape(2, 64)),
        hopper(image((3, 64, 9, 7), (40, 64, 1, 1), epilogue=nchw_residuals), shape(1, 64)),
    ]
    sources = [exe.plan.kernels[0].source.code for exe in check_cases(cases, guard=True)]
    assert "copy_row<1, 64>" in sources[0]
    assert "store_row<64>" in sources[1], "there are no asynchronous copies of 2 bytes"
    assert all("load_pair_turned<64>" in source for source in sources)


@pytest.mark.slow
def test_turned_results_of_every_length():
    tf32 = {"compute_dtype": "tf32"}
    cases = [
        hopper(image((2, 32, 15, 15), (72, 32, 1, 1), "float32", epilogue=nchw, **tf32), shape(3)),
        hopper(image((5, 32, 7, 7), (33, 32, 3, 3), "float32", padding=1, epilogue=nchw_residuals, **tf32)),
        hopper(image((2, 32, 6, 6), (24, 32, 1, 1), "float32", epilogue=nchw_residuals, **tf32), shape(1, 32)),
        hopper(image((1, 32, 1, 3), (9, 32, 1, 1), "float32", epilogue=nchw_residuals, **tf32), shape(1, 16)),
        hopper(image((2, 512, 5, 5), (16, 512, 1, 1), "float32", epilogue=nchw, **tf32), shape(split_k=2)),
        hopper(image((9, 64, 5, 3), (33, 64, 1, 1), epilogue=nchw_halves), shape(3)),
        hopper(image((7, 64, 7, 7), (40, 64, 1, 1), "float16", epilogue=nchw_residuals), in_pingpong(), blocks=2),
    ]
    for exe in check_cases(cases, guard=True):
        assert "_turned<64>" in exe.plan.kernels[0].source.code


def test_planes_of_images():
    """Windows of one element of images in NCHW: TMA brings tiles of planes, and writes such."""

    def planes(graph: fg.Graph, y: fg.Tensor) -> None:
        z = y * graph.tensor("scale", (1, y.shape[1], 1, 1), y.dtype) + graph.tensor("residual", y.shape, y.dtype)
        graph.output(graph.relu(z), name="y")

    cases = [
        hopper(convolution((3, 40, 8, 8), (24, 40, 1, 1), "bfloat16", epilogue=planes), shape(2, 16)),
        hopper(convolution((2, 24, 4, 6), (136, 24, 1, 1), "float16", epilogue=channel_bias), in_pingpong(), blocks=2),
        hopper(convolution((2, 8, 2, 4, 8), (8, 8, 1, 1, 1), "bfloat16", epilogue=channel_bias), shape(1)),
    ]
    for exe in check_cases(cases, guard=True):
        assert "tma_load" in exe.plan.kernels[0].source.code


def strided(size: tuple[int, ...], channels: int, taps: int, **attributes: Any) -> Case:
    """Returns a gradient by phases, whose rows lie apart, and a residual that lies like it."""
    graph = fg.Graph("dgrad", io_dtype="bfloat16")
    loss, w = (
        graph.tensor(name, dims, layout="channels_last")
        for name, dims in (("loss", (2, 64, 5, 6)), ("w", (64, channels, taps, taps)))
    )
    y = graph.conv_dgrad(loss, w, size=size, stride=2, **attributes)
    residual = graph.tensor("residual", y.shape, layout="channels_last")
    graph.output(graph.relu(y) + residual, name="y", layout="channels_last")
    return Case(graph, "contraction")


def test_residuals_of_phases_are_fetched_by_rows():
    cases = [
        hopper(strided((9, 11), 48, 5, padding=2), shape(1, 64)),
        hopper(strided((10, 12), 40, 4, padding=1), shape(2, 64)),
        hopper(strided((9, 12), 24, 3, padding=1), shape(1, 32)),
    ]
    for exe in check_cases(cases, guard=True):
        assert "fetch_row<" in exe.plan.kernels[0].source.code
