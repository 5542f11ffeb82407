"""Programs on pairs of 16-bit floats: one instruction for two elements, where that is at least as exact.

An instruction on pairs rounds its exact result to 16 bits.  A program that computes in float rounds once more at its
end, so pairs give the same or better as long as one operation rounds: a sum, a product, or a product to which something
is added (fma).  Operations that need not round (relu, a sign, the larger of two) may come before or behind it, for it
makes no difference whether rounding comes first.  Neither need sums of small integers, such as codes of 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen.codes import Code
from codegen.dtypes import DType
from codegen.expr import Index, Instruction, Literal, Load, Program, Result, Value

#: Operations that need not round.
_EXACT = ("-{0}", "math::relu({0})", "math::abs({0})", "math::maximum({0}, {1})", "math::minimum({0}, {1})")
_MULTIPLY, _ADD, _SUBTRACT = "{0} * {1}", "{0} + {1}", "{0} - {1}"


def pair_type(dtype: DType) -> str:
    """Returns the C type of two elements."""
    return f"Pair<{dtype.ctype}>"


#: The largest integer of which 16 bits represent all smaller ones.
_INTEGERS = {"bfloat16": 256, "float16": 2048}


def packed(program: Program, codes: Mapping[Value, Code] | None = None) -> Program | None:
    """Returns the program on pairs of what it stores; None if it has to compute in float.

    ``codes`` are values that come decoded, as pairs: in what is returned, a load of bytes is a pair of them.
    """
    target, codes = program.stores[0].operand.dtype, codes or {}
    if target.ctype not in ("bfloat16", "float16") or program.real != "float" or len(program.stores) != 1:
        return None
    needed = program.needed([program.stores[0].value], codes)
    given = [v for v in needed if isinstance(v, Load) and v not in codes]
    indexed = any(isinstance(v, Index) for v in needed)
    if indexed or program.tables or program.reductions or any(program.loads[v.operand].dtype != target for v in given):
        return None
    made: list[Instruction] = []
    known: dict[Value, Value] = {}  # results of the program's instructions as those of pairs
    rounded: dict[Value, bool] = {}
    integers: dict[Value, tuple[int, int]] = {}  # bounds of values that are integers
    most = _INTEGERS[target.ctype]
    for value, code in codes.items():
        if code.kind == "float8_e8m0" and target.ctype == "float16":
            return None
        known[value] = Load(code.load)
        if code.low is not None and code.high is not None:
            integers[value] = code.low, code.high
            if max(-code.low, code.high) > most:
                return None
        if code.offset:
            added = known[value], Literal(float(code.offset), "float")
            made.append(Instruction(program.loads[code.load].name, _ADD, added, pair_type(target)))
            known[value] = Result(len(made) - 1)
    products: dict[Value, tuple[Value, Value]] = {}  # exact products, by their values in the program
    uses = [v for i in program.instructions for v in i.args] + [program.stores[0].value]
    for number, instruction in enumerate(program.instructions):
        own, template = Result(number), instruction.template
        if own not in needed or own in codes:
            continue
        args: tuple[Value, ...] = tuple(known.get(v, v) for v in instruction.args)
        if not all(isinstance(v, Load | Result) or _fits(v, target) for v in instruction.args):
            return None
        if template == _ADD and (found := _fused(instruction.args, products)) is not None:
            factors, other = found
            if rounded.get(other, False):
                return None
            args, template, rounds = (*factors, known.get(other, other)), "math::fma({0}, {1}, {2})", True
        elif template in (_MULTIPLY, _ADD, _SUBTRACT):
            if any(rounded.get(v, False) for v in instruction.args):
                return None
            rounds = True
            if template != _MULTIPLY and all(v in integers for v in instruction.args):
                (low, high), (below, above) = (integers[v] for v in instruction.args)
                low, high = (low + below, high + above) if template == _ADD else (low - above, high - below)
                integers[own] = low, high
                rounds = max(-low, high) > most
            if template == _MULTIPLY and uses.count(own) == 1 and _added(program, own):
                products[own] = (args[0], args[1])
                rounded[own] = True
                continue
        elif template in _EXACT:
            rounds = any(rounded.get(v, False) for v in instruction.args)
        else:
            return None
        template = template.replace("math", pair_type(target))
        made.append(Instruction(instruction.name, template, args, pair_type(target)))
        known[own] = Result(len(made) - 1)
        rounded[own] = rounds
    (store,) = program.stores
    value = known.get(store.value, store.value)
    return replace(program, indices=(), instructions=tuple(made), stores=(replace(store, value=value),))


def _fits(value: Value, target: DType) -> bool:
    """Tells whether a value is a number that 16 bits represent exactly."""
    return isinstance(value, Literal) and float(target.numpy.type(value.value)) == float(value.value)


def _added(program: Program, product: Result) -> bool:
    """Tells whether the only instruction that uses a product adds something to it."""
    return any(product in i.args and i.template == _ADD for i in program.instructions)


def _fused(
    args: tuple[Value, ...], products: dict[Value, tuple[Value, Value]]
) -> tuple[tuple[Value, Value], Value] | None:
    """Returns the factors and the other term of a sum of a product and something else; None if it is no such sum."""
    for term, other in (args, args[::-1]):
        if term in products and other not in products:
            return products[term], other
    return None
