"""Codes: numbers of 8 and 4 bits, as programs decode them from bytes, and which pairs of 16-bit floats they become.

How a program takes a byte apart is not compared with a pattern: its instructions are evaluated for all bytes, at all
positions within a piece, and the numbers that come out tell what the code is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from codegen.dtypes import BY_NAME
from codegen.expr import Index, Literal, Load, Program, Result, Value

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


#: Kinds of which a byte has two.
HALVES = ("int4", "uint4", "float4_e2m1")
#: The largest offset, either way, that decoding adds at no cost (`codegen/device/codes.cuh`).
FREE_OFFSET = 120


@dataclass(frozen=True)
class Code:
    """What elements of a tensor of bytes stand for.

    load    the number of the tensor among the program's loads.
    kind    "int8", "uint8", "int4", "uint4", "float4_e2m1" or a type of 8-bit floats; of 4 bits, the lower half of a
            byte comes first.
    offset  that is added to it, an integer.
    low, high  bounds of the number with its offset, if it is an integer.
    """

    load: int
    kind: str
    offset: int = 0
    low: int | None = None
    high: int | None = None

    @property
    def apart(self) -> int:
        """How far apart the elements of a pair are, as it is decoded."""
        return 4 if self.kind in HALVES else 1


#: Instructions by their templates, on arrays: what takes codes apart.
_OPERATIONS: dict[str, Callable[..., Array]] = {
    "{0} & {1}": np.bitwise_and,
    "{0} | {1}": np.bitwise_or,
    "{0} ^ {1}": np.bitwise_xor,
    "{0} + {1}": np.add,
    "{0} - {1}": np.subtract,
    "{0} * {1}": np.multiply,
    "-{0}": np.negative,
    "{0} >= {1}": np.greater_equal,
    "{0} > {1}": np.greater,
    "{0} < {1}": np.less,
    "{0} <= {1}": np.less_equal,
    "{0} == {1}": np.equal,
    "{0} != {1}": np.not_equal,
    "{2} ? {0} : {1}": lambda a, b, c: np.asarray(np.where(c, a, b)),
    "math::wrapping_add({0}, {1})": np.add,
    "math::wrapping_sub({0}, {1})": np.subtract,
    "math::wrapping_mul({0}, {1})": np.multiply,
    "math::shift_right({0}, {1})": np.right_shift,
    "math::shift_left({0}, {1})": np.left_shift,
    "math::maximum({0}, {1})": np.maximum,
    "math::minimum({0}, {1})": np.minimum,
}
_CONVERSION = re.compile(r"(convert|round_to)<(\w+)>\(\{0\}\)")
_NUMPY = {"float": np.float32, "bool": np.bool_} | {
    f"{sign}int{bits}": np.dtype(f"{sign}int{bits}").type for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def codes(program: Program, elements: Mapping[Value, Array]) -> dict[Value, Code]:
    """Returns the values of a program that stand for codes, the last ones that follow from one byte alone.

    ``elements`` has, for each element of a piece, which element of a vector a load is (all zeros: the same one), and
    the number that an index is; loads and indices of which that is not known are missing.
    """
    found: dict[Value, Code] = {}
    for n, op in enumerate(program.loads):
        if Load(n) in elements and op.dtype.itemsize == 1 and op.dtype.is_float:
            found[Load(n)] = Code(n, op.dtype.name)
        elif Load(n) in elements and op.dtype.name in ("int8", "uint8"):
            found |= _decoded(program, n, elements)
    return found


def _decoded(program: Program, load: int, elements: Mapping[Value, Array]) -> dict[Value, Code]:
    """Returns the values that follow from a tensor of bytes and positions, and are floats that something else uses."""
    own, of = Load(load), program.loads[load].dtype.name
    place = elements[own]
    # Element 0 to 255 of the first axis: the byte; the second one: the element of the piece.
    every: Array = np.arange(256, dtype=np.uint8).view(_NUMPY[of])[:, None]
    known: dict[Value, Array] = {own: np.broadcast_to(every, (256, len(place)))}
    known |= {v: e[None].astype(np.int32) for v, e in elements.items() if isinstance(v, Index)}
    of_byte: set[Value] = {own}
    with np.errstate(all="ignore"):
        for number, instruction in enumerate(program.instructions):
            args = [_literal(v) if isinstance(v, Literal) else known.get(v) for v in instruction.args]
            value = None if any(a is None for a in args) else _evaluated(instruction.template, args, instruction.ctype)
            if value is not None:
                known[Result(number)] = value
                if any(v in of_byte for v in instruction.args):
                    of_byte.add(Result(number))
    users: list[tuple[Value, ...]] = [i.args for n, i in enumerate(program.instructions) if Result(n) not in known]
    users.append(tuple(store.value for store in program.stores))
    found: dict[Value, Code] = {}
    for end in dict.fromkeys(v for args in users for v in args if v in of_byte):
        code = _code(load, known[end], place)
        if code is None:
            return {}
        found[end] = code
    return found


def _literal(value: Literal) -> Array | None:
    kind = _NUMPY.get(value.ctype)
    return None if kind is None else np.asarray(value.value).astype(kind)


def _evaluated(template: str, args: list[Any], ctype: str) -> Array | None:
    """Returns what an instruction makes of arrays; None unless that is known, and exact."""
    kind = _NUMPY.get(ctype)
    conversion = _CONVERSION.fullmatch(template)
    if conversion is not None:
        to = conversion[2]
        rounded = args[0].astype(_NUMPY[to]) if to in _NUMPY else args[0].astype(BY_NAME[to].numpy).astype(np.float32)
        return rounded if bool(np.all(rounded == args[0])) else None
    if kind is None or template not in _OPERATIONS:
        return None
    return np.asarray(_OPERATIONS[template](*args)).astype(kind)


def _code(load: int, values: Array, place: Array) -> Code | None:
    """Returns the code whose numbers these are: by byte, and by element of a piece."""
    if values.dtype != np.float32 or values.shape[1] not in (1, len(place)):
        return None
    byte = np.arange(256, dtype=np.uint8)[:, None]
    each = np.arange(len(place))[None]
    twice = len(place) == 2 * (int(place.max()) + 1) and bool(np.all(place == each[0] // 2))
    if not twice and len(set(place)) != len(place) and place.any():
        return None
    nibble = byte >> (each % 2 * 4).astype(np.uint8) & 15
    kinds: dict[str, Array] = {"int8": byte.view(np.int8), "uint8": byte}
    if twice:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        e2m1 = np.where(nibble & 8, -table[nibble & 7], table[nibble & 7])
        kinds = {"uint4": nibble, "int4": (nibble ^ 8).astype(np.int8) - 8, "float4_e2m1": e2m1}
    for kind, numbers in kinds.items():
        difference = values - numbers.astype(np.float32)
        offset = float(difference.flat[0])
        if bool(np.all(difference == offset)) and offset == int(offset) and (not offset or kind != "float4_e2m1"):
            if kind == "float4_e2m1":
                return Code(load, kind)
            return Code(load, kind, int(offset), int(values.min()), int(values.max()))
    return None
