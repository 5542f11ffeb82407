"""Pointwise work on tensors with unfavorable strides, and calls so short that only their overhead counts."""

from __future__ import annotations

from collections.abc import Iterator

from fusegraph.bench.workload import Input, Workload, short
from fusegraph.layout import layout_strides

Strides = tuple[int, ...] | None


def layouts() -> Iterator[Workload]:
    """Yields sums of two aligned, odd, unaligned, transposed and broadcast operands, and changes of layout.

    The fraction of the floor (a device copy of as many bytes) that each reaches should be compared with that of the
    aligned ones.
    """
    square, odd, narrow = (8192, 8192), (8191, 8193), (8192, 8191)
    apart = (8193, 1)
    for dtype in ("float32", "bfloat16", "int8"):
        cases: list[tuple[str, tuple[int, ...], Strides, tuple[int, ...], Strides, Strides]] = [
            ("aligned", square, None, square, None, None),
            ("odd", odd, None, odd, None, None),
            ("rows 8193 elements apart", narrow, apart, narrow, apart, apart),
            ("second one transposed", square, None, square, (1, 8192), None),
            ("second one transposed", odd, None, odd, (1, 8191), None),
            ("row broadcast", square, None, (8192,), None, None),
            ("row broadcast", narrow, None, (8191,), None, None),
            ("column broadcast", square, None, (8192, 1), None, None),
            ("column broadcast", narrow, None, (8192, 1), None, None),
        ]
        for what, shape, a, other, b, out in cases:
            yield Workload(
                f"add {'x'.join(map(str, shape))} {what} {short(dtype)}",
                dtype,
                (Input("a", shape, strides=a), Input("b", other, strides=b)),
                shape,
                "add",
                output_strides=out,
            )
    image = (64, 256, 56, 56)
    for dtype in ("bfloat16", "float32"):
        for source, target in (("NCHW", "NHWC"), ("NHWC", "NCHW")):
            yield Workload(
                f"{source} to {target} 64x256x56x56 {short(dtype)}",
                dtype,
                (Input("x", image, source),),
                image,
                f"to {target}",
                output_strides=layout_strides(image, target),
            )


def calls() -> Iterator[Workload]:
    """Yields workloads with three inputs and one output of few elements: the host dominates the time of a call."""
    for n in (1 << 10, 1 << 16):
        operands = tuple(Input(name, (n,)) for name in "abc")
        yield Workload(f"sigmoid(a+b*c) {n} fp32", "float32", operands, (n,), "sigmoid_fma")
