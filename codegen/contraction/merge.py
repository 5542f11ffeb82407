"""Equivalent forms of a contraction: with fewer dimensions, or with rows and columns exchanged."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.iteration import Strides, collapse, restrided
from codegen.records import changed
from codegen.spec import ContractionSpec


def merged(spec: ContractionSpec) -> ContractionSpec:
    """Returns the spec with neighbouring batch, row and reduction dimensions merged, and those of one element dropped.

    The reduction runs in the memory order of operand A: neighbouring threads read neighbouring elements.
    """
    a, b, program, terms, results = spec.a, spec.b, spec.program, spec.terms, spec.results
    nb, nr = len(spec.batch), len(spec.m)
    every = program.strides
    over_a, over_b = a.steps(), b.steps()
    lengths = [len(every), len(over_a[0]), len(over_b[0])]
    # A limit takes part like an operand.
    limits = [x.batch for x in (*terms, *results)]
    batch, over = collapse(spec.batch, [*(s[:nb] for s in every), *over_a[0], *over_b[0], *limits], range(nb))
    batches, a_batch, b_batch, term_batch, result_batch = _cut(over, [*lengths, len(terms)])
    rows, over_rows, a_rows = spec.m, [s[nb : nb + nr] for s in every], over_a[1]
    if not results:  # else the program's rows are not those of the operands
        rows, over = collapse(rows, [*over_rows, *a_rows], range(nr))
        over_rows, a_rows = _cut(over, lengths[:1])
    order = sorted(range(len(spec.k)), key=lambda d: (-abs(a.inner[d]), d))
    inner, over = collapse(spec.k, [*over_a[2], *over_b[2], *(x.inner for x in terms)], order)
    a_inner, b_inner, term_inner = _cut(over, lengths[1:])
    new = [x + y + (s[-1],) for x, y, s in zip(batches, over_rows, every)]
    return changed(
        spec,
        batch=batch,
        m=rows,
        k=inner,
        a=a.stepped(a_batch, a_rows, a_inner),
        b=b.stepped(b_batch, over_b[1], b_inner),
        terms=tuple(changed(x, batch=s, inner=i) for x, s, i in zip(terms, term_batch, term_inner)),
        results=tuple(changed(x, batch=s) for x, s in zip(results, result_batch)),
        program=restrided(program, new),
    )


def exchanged(spec: ContractionSpec) -> ContractionSpec | None:
    """Returns the spec with its operands, and so rows and columns, exchanged; None if the operands differ in kind.

    They do with an image, phases of a strided convolution, several operands B, totals, or rows at unequal distances.
    """
    a, b, program = spec.a, spec.b, spec.program
    if spec.others or spec.totals or spec.terms or spec.results or a.image is not None or a.limits or b.limits:
        return None
    nb, nr = len(spec.batch), len(spec.m)
    every = program.strides
    batch, outer, inner = a.steps()
    rows, over = collapse(spec.m, [*(s[nb : nb + nr] for s in every), *outer], range(nr))
    if len(rows) > 1:
        return None
    new = [s[:nb] + s[nb + nr :] + r for s, r in zip(every, over)]
    return changed(
        spec, m=spec.n, n=rows, a=b, b=a.stepped(batch, over[len(every) :], inner), program=restrided(program, new)
    )


def _cut(every: Sequence[Strides], lengths: Sequence[int]) -> list[list[Strides]]:
    """Returns a list cut into parts of these lengths, and the rest."""
    parts, start = [], 0
    for length in (*lengths, len(every)):
        parts.append(list(every[start : start + length]))
        start += length
    return parts
