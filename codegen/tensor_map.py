"""Which tensors a TMA map can describe, and what one of its copies brings.

The rules are those of ``cuTensorMapEncodeTiled`` and ``cuTensorMapEncodeIm2col`` (CUDA driver API, "Tensor Map Object
Management"), for tensors that are not interleaved.
"""

from __future__ import annotations

from math import prod

from codegen.dtypes import ALL
from codegen.spec import TensorMap

#: Bytes of an element of each C type, and of floats that loads round to tf32.
ELEMENT_BYTES = {dtype.ctype: dtype.itemsize for dtype in ALL} | {"tf32": 4}

#: Addresses, strides and rows of a box are multiples of this many bytes.
UNIT = 16
MOST_RANK = 5
MOST_BOX, MOST_PIXELS, MOST_STEP = 256, 1024, 8
MOST_SIZE, MOST_STRIDE = 1 << 32, 1 << 40
SWIZZLES = (0, 32, 64, 128)

#: Bits of an im2col corner's coordinate by the number of spatial dimensions: 16 for one, 8 for two, 5 for three.
CORNER_BITS = {1: 16, 2: 8, 3: 5}


def box_bytes(described: TensorMap) -> int:
    """Returns how many bytes a load of its box brings."""
    return prod(described.box) * ELEMENT_BYTES[described.element]


def corner_limit(spatial: int) -> int:
    """Returns the limit of im2col corners with ``spatial`` dimensions: they are at least its negative, and less than
    it.
    """
    return 1 << (CORNER_BITS[spatial] - 1)


def offset_limit(spatial: int) -> int:
    """Returns the largest offset of an im2col load in each of ``spatial`` dimensions."""
    return (1 << CORNER_BITS[spatial]) - 1


def refusal(described: TensorMap) -> str | None:
    """Returns why there can be no such map, or None.

    The address that it will hold, without ``offset``, must be a multiple of 16.
    """
    if described.element not in ELEMENT_BYTES:
        return f"its element type {described.element!r} is none of {', '.join(ELEMENT_BYTES)}"
    return _refused_tensor(described) or (
        _refused_box(described) if described.lower is None else _refused_pixels(described)
    )


def _refused_tensor(described: TensorMap) -> str | None:
    rank = len(described.sizes)
    if not 2 <= rank <= MOST_RANK:
        return f"it has {rank} dimensions; 2 to {MOST_RANK} are possible"
    if len(described.strides) != rank - 1 or len(described.steps) != rank:
        return f"{len(described.strides)} strides and {len(described.steps)} steps do not fit {rank} dimensions"
    for name, value, most in (
        *(("size", size, MOST_SIZE) for size in described.sizes),
        *(("step", step, MOST_STEP) for step in described.steps),
    ):
        if not 1 <= value <= most:
            return f"a {name} is {value}; 1 to {most} are possible"
    for stride in described.strides:
        if stride % UNIT or not 0 <= stride < MOST_STRIDE:
            return f"a stride is {stride} bytes; multiples of {UNIT} below {MOST_STRIDE} are possible"
    if described.offset % UNIT:
        return f"it begins {described.offset} bytes into its tensor; multiples of {UNIT} are possible"
    if described.steps[0] != 1:
        return f"the step of the innermost dimension is {described.steps[0]}; only 1 is possible"
    if described.swizzle not in SWIZZLES:
        return f"its swizzle is {described.swizzle} bytes; {', '.join(map(str, SWIZZLES))} are possible"
    return None


def _refused_row(described: TensorMap) -> str | None:
    """Returns why the innermost dimension of a box is not possible, or None."""
    row = described.box[0] * ELEMENT_BYTES[described.element]
    if row % UNIT:
        return f"a row of its box has {row} bytes; multiples of {UNIT} are possible"
    if described.swizzle and row > described.swizzle:
        return f"a row of its box has {row} bytes, more than the {described.swizzle} of the swizzle"
    return None


def _refused_box(described: TensorMap) -> str | None:
    if described.upper is not None:
        return "it has an upper corner and no lower one"
    if len(described.box) != len(described.sizes):
        return f"its box has {len(described.box)} dimensions and the tensor {len(described.sizes)}"
    for size, step in zip(described.box, described.steps):
        if not 1 <= size <= MOST_BOX or (size - 1) * step >= MOST_BOX:
            return f"its box spans {size} elements in steps of {step}; up to {MOST_BOX} are possible"
    return _refused_row(described)


def _refused_pixels(described: TensorMap) -> str | None:
    spatial = len(described.sizes) - 2
    if spatial not in CORNER_BITS:
        return f"im2col takes 3 to 5 dimensions, not {len(described.sizes)}"
    lower, upper = described.lower or (), described.upper or ()
    if len(lower) != spatial or len(upper) != spatial:
        return f"its corners have {len(lower)} and {len(upper)} coordinates for {spatial} spatial dimensions"
    if described.steps[-1] != 1:
        return f"the step from image to image is {described.steps[-1]}; only 1 is possible"
    if len(described.box) != 2 or not 1 <= described.box[0] <= MOST_BOX or not 1 <= described.box[1] <= MOST_PIXELS:
        return f"its box is {described.box}; (channels, pixels) up to ({MOST_BOX}, {MOST_PIXELS}) are possible"
    limit = corner_limit(spatial)
    for size, low, high in zip(described.sizes[1:], lower, upper):
        if not -limit <= low < limit or not -limit <= high < limit:
            return f"a corner is {low} or {high}; {-limit} to {limit - 1} are possible in {spatial} dimensions"
        if size - 1 + high < low:
            return f"its corners {low} and {high} leave nothing of {size} elements"
    return _refused_row(described)
