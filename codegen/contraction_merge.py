"""A contraction with fewer dimensions: neighbours that all operands and limits step over alike become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from codegen.expr import Store
from codegen.iteration import Strides, collapse
from codegen.spec import ContractionSpec, Limit


def merged(spec: ContractionSpec) -> ContractionSpec:
    """The spec with neighbouring batch, row and reduction dimensions merged, those of one element dropped.

    The reduction runs in the memory order of the first factor: neighbouring threads read neighbouring elements.
    """
    a, b, program = spec.a, spec.b, spec.program
    nb, nr = len(spec.batch), len(spec.rows)
    every = [op.strides for op in program.operands] + list(program.indices)
    # A limit takes part like an operand.
    limits = [*a.limits, *b.limits, *spec.terms, *spec.results]
    batch, over = collapse(
        spec.batch, [s[:nb] for s in every] + [a.batch, b.batch, *(x.batch for x in limits)], range(nb)
    )
    batches, a_batch, b_batch, limit_batches = _split(over, len(every))
    limits = [replace(x, batch=s) for x, s in zip(limits, limit_batches)]
    rows, over_rows = spec.rows, [s[nb : nb + nr] for s in every]
    a_rows, limit_rows = a.outer, [x.outer for x in a.limits]
    if not spec.results:  # else the program's rows are others
        rows, over = collapse(rows, [*over_rows, a_rows, *limit_rows], range(nr))
        over_rows, a_rows, limit_rows = over[: len(every)], over[len(every)], over[len(every) + 1 :]
    limits[: len(a.limits)] = [replace(x, outer=s) for x, s in zip(limits, limit_rows)]
    order = sorted(range(len(spec.inner)), key=lambda d: (-abs(a.inner[d]), d))
    count = len(limits) - len(spec.results)
    inner, over = collapse(spec.inner, [a.inner, b.inner, *(x.inner for x in limits[:count])], order)
    limits[:count] = [replace(x, inner=s) for x, s in zip(limits, over[2:])]
    new = [x + y + (s[-1],) for x, y, s in zip(batches, over_rows, every)]
    n, m = len(program.loads), len(program.stores)
    parts = _cut(limits, [len(a.limits), len(b.limits), len(spec.terms), len(spec.results)])
    return replace(
        spec,
        batch=batch,
        rows=rows,
        inner=inner,
        a=replace(a, batch=a_batch, outer=a_rows, inner=over[0], limits=parts[0]),
        b=replace(b, batch=b_batch, inner=over[1], limits=parts[1]),
        terms=parts[2],
        results=parts[3],
        program=replace(
            program,
            loads=tuple(replace(op, strides=s) for op, s in zip(program.loads, new)),
            stores=tuple(Store(replace(st.operand, strides=s), st.value) for st, s in zip(program.stores, new[n:])),
            indices=tuple(new[n + m :]),
        ),
    )


def _split(over: list[Strides], count: int) -> tuple[list[Strides], Strides, Strides, list[Strides]]:
    return over[:count], over[count], over[count + 1], over[count + 2 :]


def _cut(limits: Sequence[Limit], lengths: Sequence[int]) -> list[tuple[Limit, ...]]:
    """The limits in parts of these lengths."""
    parts, start = [], 0
    for length in lengths:
        parts.append(tuple(limits[start : start + length]))
        start += length
    return parts
