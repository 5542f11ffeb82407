"""Operators of ONNX's table that are written with many ops: sizes, types and values that the node tests do not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import model, tensor, value

import fusegraph as fg
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.frontends.onnx.operators import fourier
from fusegraph.lowering.base import Options

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)


@dataclass
class Case:
    """A model of one node, given what is known of its inputs and what is not, and its results."""

    what: str
    proto: onnx.ModelProto
    given: dict[str, Array]
    expected: list[Array]
    values: dict[str, Array]
    close: float = 2e-4


def case(
    operator: str,
    arrays: list[Array | None],
    expected: Any = None,
    *,
    known: tuple[int, ...] = (),
    values: tuple[int, ...] = (),
    opset: int = 21,
    domain: str = "",
    outputs: int = 1,
    close: float = 2e-4,
    **attributes: Any,
) -> Case:
    """known inputs are initialisers, the values of others are given; expected is by default what ONNX's evaluator finds
    in float64.
    """
    names = ["" if x is None else f"x{n}" for n, x in enumerate(arrays)]
    made = [f"y{n}" for n in range(outputs)]
    node = helper.make_node(operator, names, made, domain=domain, **attributes)
    fed = {n: x for k, (n, x) in enumerate(zip(names, arrays)) if x is not None and k not in known}
    inputs = [value(n, x.shape, helper.np_dtype_to_tensor_dtype(x.dtype)) for n, x in fed.items()]
    constants = [tensor(names[k], arrays[k]) for k in known]
    opsets = [helper.make_opsetid(domain, 1)] if domain else []
    proto = model([node], inputs, [value(n, None, 0) for n in made], constants, opset=opset, opsets=opsets)
    if expected is None:
        wide = {n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in fed.items()}
        expected = ReferenceEvaluator(proto).run(None, wide)
    expected = expected if isinstance(expected, list) else [expected]
    chosen = {names[k]: fed.pop(names[k]) for k in values}
    what = f"{operator} {[None if x is None else x.shape for x in arrays]} {attributes}"
    return Case(what, proto, fed, expected, chosen, close)


def agree(cases: list[Case]) -> None:
    """Checks cases as kernels on the CPU, built in one run of the compiler, and on the reference."""
    models = [fg.onnx.from_proto(c.proto, values=c.values) for c in cases]
    kernels = [CpuExecutable(m.graph, Options(), lazy=True) for m in models]
    build_together(kernels)
    for c, m, on_cpu in zip(cases, models, kernels):
        for executable in (on_cpu, m.compile("reference")):
            found = executable(*(c.given[n] for n in m.inputs))
            for y, expected in zip(found if isinstance(found, tuple) else (found,), c.expected, strict=True):
                assert y.shape == expected.shape, c.what
                scale = c.close * max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
                np.testing.assert_allclose(
                    y.astype(np.float64), expected.astype(np.float64), rtol=c.close, atol=scale, err_msg=c.what
                )


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return np.asarray(RNG.normal(size=shape)).astype(dtype)


# ---- Fourier transforms


def transformed(x: Array, axis: int, size: int | None, inverse: int, onesided: int) -> Array:
    """Computes a Fourier transform with NumPy in float64."""
    whole = x[..., 0].astype(np.float64) + (1j * x[..., 1].astype(np.float64) if x.shape[-1] == 2 else 0)
    if inverse and onesided:
        return np.fft.irfft(whole, size, axis=axis)[..., None]
    y = (np.fft.ifft if inverse else np.fft.fft)(whole, size, axis=axis)
    if onesided:
        y = np.take(y, np.arange(y.shape[axis] // 2 + 1), axis=axis)
    return np.stack([y.real, y.imag], -1)


def transforms(sizes: tuple[tuple[int, int | None], ...]) -> Iterator[Case]:
    """Every other one of all ways, others for each size."""
    for (number, (n, size)), inverse, onesided, parts in product(enumerate(sizes), (0, 1), (0, 1), (1, 2)):
        if (number + inverse + onesided + parts) % 2 or (size is None and inverse and onesided and n == 1):
            continue
        x = normal(2, n, 3, parts)
        length = None if size is None else np.int64(size)
        arrays = [x, None if length is None else np.asarray(length), np.asarray(np.int64(-3))]
        known = (2,) if size is None else (1, 2)
        expected = transformed(x, 1, size, inverse, onesided)
        yield case("DFT", arrays, expected, known=known, inverse=inverse, onesided=onesided)


def test_transforms_of_any_length() -> None:
    agree(list(transforms(((1, None), (2, None), (7, None), (12, 5), (9, 16)))))


@pytest.mark.slow
def test_transforms_that_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lengths with divisors: 30 = 5 * 6, 36 = 6 * 6, 26 = 2 * 13, whose 13 is one matrix again."""
    monkeypatch.setattr(fourier, "WHOLE", 4)
    agree(list(transforms(((30, None), (20, 36), (30, 26)))))


def test_long_transforms() -> None:
    """So long that a matrix would not do, and of a prime length."""
    for n in (5040, 1009):
        x = normal(1, n, 1)
        agree([case("DFT", [x, None, np.asarray(np.int64(1))], transformed(x, 1, None, 0, 1), known=(2,), onesided=1)])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_transforms_of_other_floats(dtype: Any) -> None:
    x = normal(3, 12, 2, dtype=dtype)
    close = 2e-3 if dtype == np.float16 else 1e-12
    agree([case("DFT", [x], transformed(x, 1, None, 0, 0), close=close), case("DFT", [x], transformed(x, 0, None, 1, 0),
          opset=19, axis=0, inverse=1, close=close)])  # fmt: skip


def test_frames() -> None:
    """STFT, as torch computes it."""
    cases = []
    for n, size, step, windowed in ((40, 8, 3, True), (40, 9, 9, False), (16, 16, 5, True)):
        x, window = normal(2, n, 1), np.hanning(size).astype(np.float32) + 0.1
        for onesided in (0, 1):
            of = torch.from_numpy(x[..., 0].astype(np.float64))
            shape = torch.from_numpy(window.astype(np.float64)) if windowed else torch.ones(size, dtype=torch.float64)
            y = torch.stft(of, size, step, size, shape, center=False, onesided=bool(onesided), return_complex=True)
            expected = torch.view_as_real(y.transpose(1, 2)).numpy()
            arrays = [x, np.asarray(np.int64(step)), window if windowed else None]
            arrays += [] if windowed else [np.asarray(np.int64(size))]
            cases.append(case("STFT", arrays, expected, known=(1,) if windowed else (1, 3), onesided=onesided))
    agree(cases)


# ---- regions and columns


def test_regions() -> None:
    """Of two images, inside of them, across their borders, beyond them and without extent; a number of samples that is
    given, or that follows from the region.
    """
    x = normal(2, 3, 7, 9)
    rois = np.array([[0, 0, 4, 5], [2.2, 1.7, 8.9, 6.1], [-3, -2, 2, 2], [6, 5, 14, 12], [20, 20, 30, 30],
                     [3, 3, 3, 3]], np.float32)  # fmt: skip
    images = np.array([0, 1, 1, 0, 1, 0])
    cases = []
    halves = ("half_pixel", "output_half_pixel")
    for mode, how, ratio in (("avg", 0, 2), ("avg", 1, 0), ("max", 0, 0), ("max", 1, 2)):
        more = {
            "mode": mode,
            "coordinate_transformation_mode": halves[how],
            "sampling_ratio": ratio,
            "spatial_scale": 0.75,
        }
        values = () if ratio else (1,)
        cases.append(case("RoiAlign", [x, rois, images], values=values, output_height=3, output_width=2, **more))
    agree(cases)


@pytest.mark.slow
def test_deformed_windows() -> None:
    cases = []
    for groups, shares, stride, dilation, masked in ((1, 1, 1, 1, True), (2, 2, 2, 1, False), (1, 2, 1, 2, True)):
        x, w, bias = normal(2, 4, 6, 7), normal(6, 4 // groups, 3, 2), normal(6)
        out = [(n + 2 - (k - 1) * dilation - 1) // stride + 1 for n, k in ((6, 3), (7, 2))]
        offset, mask = 2 * normal(2, shares * 12, *out), normal(2, shares * 6, *out)
        more = {"group": groups, "offset_group": shares, "strides": [stride] * 2, "dilations": [dilation] * 2}
        arrays = [x, w, offset, bias, *([mask] if masked else [])]
        cases.append(case("DeformConv", arrays, opset=22, pads=[1, 1, 1, 1], **more))
    agree(cases)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_columns(dtype: Any) -> None:
    """As torch folds them."""
    cases = []
    for stride, dilation, pad in (((1, 1), (1, 1), (0, 0)), ((2, 3), (1, 2), (1, 2)), ((3, 3), (2, 1), (0, 1))):
        blocks = [(n + 2 * p - (k - 1) * d - 1) // s + 1
                  for n, k, s, d, p in zip((7, 9), (2, 3), stride, dilation, pad)]  # fmt: skip
        x = normal(2, 3 * 6, blocks[0] * blocks[1], dtype=dtype)
        fold = torch.nn.Fold((7, 9), (2, 3), dilation=dilation, padding=pad, stride=stride)
        expected = fold(torch.from_numpy(x.astype(np.float64))).numpy()
        arrays = [x, np.array([7, 9]), np.array([2, 3])]
        close = 1e-3 if dtype == np.float16 else 1e-5
        more = {"strides": stride, "dilations": dilation, "pads": [*pad, *pad]}
        cases.append(case("Col2Im", arrays, expected, known=(1, 2), close=close, **more))
    agree(cases)


def test_pooled_images_are_put_back() -> None:
    """MaxUnpool of what MaxPool made, of several planes, and into a larger image."""
    x = normal(2, 3, 6, 4)
    y, flat = torch.nn.functional.max_pool2d(torch.from_numpy(x), 2, return_indices=True)
    expected = torch.nn.functional.max_unpool2d(y, flat, 2).numpy()
    places = flat.numpy() + np.arange(6).reshape(2, 3, 1, 1) * 24  # ONNX counts in the whole tensor
    larger = np.zeros((2, 3, 7, 6), np.float32)
    larger[:, :, :6, :4] = expected
    more = {"kernel_shape": [2, 2], "strides": [2, 2]}
    agree([case("MaxUnpool", [y.numpy(), places], expected, **more),
           case("MaxUnpool", [y.numpy(), places, np.array(larger.shape)], larger, known=(2,), **more)])  # fmt: skip


@pytest.mark.parametrize("opset", [7, 9])
def test_images_are_enlarged(opset: int) -> None:
    """Upsample: positions are those of Resize without a shift."""
    x, factors, cases = normal(1, 2, 3, 5), np.array([1, 1, 2.5, 1.4], np.float32), []
    for mode in ("nearest", "linear"):
        like = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        resize = case("Resize", [x, None, factors], **like)
        if opset == 7:
            scales = [float(f) for f in factors]
            cases.append(case("Upsample", [x], resize.expected, opset=7, mode=mode, scales=scales))
        else:
            cases.append(case("Upsample", [x, factors], resize.expected, known=(1,), opset=9, mode=mode))
    agree(cases)


# ---- matrices


@pytest.mark.slow
def test_determinants() -> None:
    cases = [case("Det", [x], np.asarray(np.linalg.det(x.astype(np.float64))), opset=22)
             for x in (normal(4, 2, n, n) for n in (0, 1, 3, 6))]  # fmt: skip
    swapped = np.array([[0, 2, 1], [0, 0, 3], [4, 5, 6]], np.float32)  # pivots that are zeros
    singular = np.array([[1, 2, 3], [2, 4, 6], [0, 1, 1]], np.float32)
    infinite = np.full((3, 3), np.nan, np.float32)
    for x, expected in ((swapped, 24.0), (singular, 0.0), (infinite, np.nan), (np.zeros((4, 4), np.float32), 0.0)):
        cases.append(case("Det", [x], np.asarray(expected), opset=22))
    tall = normal(6, 6, dtype=np.float64)
    cases.append(case("Det", [tall], np.asarray(np.linalg.det(tall)), opset=22, close=1e-12))
    agree(cases)


# ---- other domains


@pytest.mark.parametrize("step", [0, 3])
def test_steps_of_optimisers(step: int) -> None:
    rate, count = np.float32(0.1), np.asarray(np.int64(step))
    x, g, v, h = (normal(3, 5), normal(3, 5), normal(3, 5), np.abs(normal(3, 5)))
    domain = "ai.onnx.preview.training"
    norm = {"norm_coefficient": 0.01}
    first = [np.asarray(rate), count]
    wide = [a.astype(np.float64) for a in (x, g, v, h)]
    regular = 0.01 * wide[0] + wide[1]
    squares = wide[3] + regular**2
    moved = wide[0] - 0.1 / (1 + step * 0.2) * regular / (np.sqrt(squares) + 1e-3)
    share = 0.8 if step else 1.0
    velocity = 0.9 * wide[2] + share * regular
    third, fourth = 0.9 * wide[2] + 0.1 * regular, 0.95 * wide[3] + 0.05 * regular**2
    rates = 0.1 * np.sqrt(1 - 0.95**step) / (1 - 0.9**step) if step else 0.1
    adam = (1 - 0.05) * (wide[0] - rates * third / (np.sqrt(fourth) + 1e-3))
    agree([
        case("Adagrad", [*first, x, g, h], [moved, squares], domain=domain, outputs=2, decay_factor=0.2,
             epsilon=1e-3, **norm),
        case("Momentum", [*first, x, g, v], [wide[0] - 0.1 * velocity, velocity], domain=domain, outputs=2,
             alpha=0.9, beta=0.8, mode="standard", **norm),
        case("Momentum", [*first, x, g, v], [wide[0] - 0.1 * (regular + 0.9 * velocity), velocity], domain=domain,
             outputs=2, alpha=0.9, beta=0.8, mode="nesterov", **norm),
        case("Adam", [*first, x, g, v, h], [adam, third, fourth], domain=domain, outputs=3, alpha=0.9, beta=0.95,
             epsilon=1e-3, norm_coefficient_post=0.05, **norm),
    ])  # fmt: skip


def test_grams() -> None:
    """Of one, two and three numbers, several of which share a place."""
    x = RNG.integers(0, 4, (3, 11)).astype(np.int32)
    pool = [0, 1, 2, 7, 0, 1, 1, 2, 3, 3, 0, 1, 2, 3, 2, 1]
    more = {"pool_int64s": pool, "ngram_counts": [0, 4, 10], "ngram_indexes": [0, 3, 2, 1, 4, 5, 3, 8, 7]}
    cases = []
    for mode, least, most, skips in (("TF", 1, 3, 2), ("IDF", 2, 3, 0), ("TFIDF", 1, 2, 0), ("TFIDF", 2, 2, 2)):
        each = {"mode": mode, "min_gram_length": least, "max_gram_length": most, "max_skip_count": skips, **more}
        each["weights"] = [0.5 * n - 1 for n in range(9)]
        cases += [case("TfIdfVectorizer", [rows], **each) for rows in (x, x[0])]
    agree(cases)


def test_features() -> None:
    x, picked = normal(3, 4, 5), np.array([[-1, 0, 3]])
    agree([case("ArrayFeatureExtractor", [x, picked], x[..., [-1, 0, 3]], domain="ai.onnx.ml"),
           case("ArrayFeatureExtractor", [x[0, 0], picked], x[0, :1, [-1, 0, 3]].T, domain="ai.onnx.ml"),
           case("Binarizer", [x], (x > 0.5).astype(np.float32), domain="ai.onnx.ml", threshold=0.5)])  # fmt: skip


# ---- bodies


def test_scans_of_batches() -> None:
    """Sums of each sample, of its own length, one way and the other."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Identity", ["t"], ["y"])],
        "body",
        [value("s", [2]), value("x", [2])],
        [value("t", [2]), value("y", [2])],
    )
    start, x, lengths = normal(3, 2), normal(3, 4, 2), [4, 2, 1]
    for back, known in product((0, 1), (True, False)):
        node = helper.make_node("Scan", ["lengths" if known else "", "s", "x"], ["last", "all"], num_scan_inputs=1,
                                body=body, directions=[back])  # fmt: skip
        proto = model([node], [value("s", [3, 2]), value("x", [3, 4, 2])], [value("last", [3, 2]), value("all", None)],
                      [tensor("lengths", np.array(lengths))] if known else [], opset=8)  # fmt: skip
        last, every = np.zeros((3, 2)), np.zeros((3, 4, 2))
        for b, n in enumerate(lengths if known else [4, 4, 4]):
            own = x[b, :n][::-1] if back else x[b, :n]
            every[b, :n] = start[b] + np.cumsum(own, 0)
            last[b] = every[b, n - 1]
        agree([Case(f"Scan {back} {known}", proto, {"s": start, "x": x}, [last, every], {})])


# ---- attention


def test_masks_of_fewer_keys() -> None:
    """Keys that a mask does not have are masked."""
    q, k, v = (normal(2, 3, n, 8) for n in (4, 6, 6))
    cases = []
    for size, truth in product((6, 4, 1), (True, False)):
        mask = RNG.random((4, size)) < 0.7 if truth else normal(4, size)
        cases.append(case("Attention", [q, k, v, mask], opset=24))
    agree(cases)
