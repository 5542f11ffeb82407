"""Batches of a contraction whose sums are empty: phases of a strided convolution's gradient under which no tap lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

from codegen.iteration import linear
from codegen.spec import ContractionSpec, Limit


def idle(spec: ContractionSpec) -> tuple[Limit, ...]:
    """Returns limits on the batch alone: where one is broken, no term of the sum has elements."""
    found = []
    for x in spec.terms:
        least = x.start + sum(min(step * (size - 1), 0) for step, size in zip(x.inner, spec.k))
        limit = replace(x, outer=(), inner=(), start=least)
        low, high = limit.ends(spec.batch, (), ())
        if low >= 0 and high >= x.size:
            found.append(limit)
    return tuple(found)


def condition(limits: Sequence[Limit], batch: Sequence[str]) -> str:
    """Returns the C condition that a batch with these coordinates has no terms; empty if each may have some."""
    return " || ".join(f"{linear([*zip(batch, x.batch)], x.start)} >= {x.size}" for x in limits)


def busy_share(spec: ContractionSpec) -> float:
    """Returns the share of the batches that have terms."""
    limits = idle(spec)
    if not limits:
        return 1.0
    dims = [d for d, size in enumerate(spec.batch) if any(x.batch[d] for x in limits)]
    every = [dict(zip(dims, at)) for at in product(*(range(spec.batch[d]) for d in dims))]
    busy = [at for at in every if all(x.start + sum(x.batch[d] * b for d, b in at.items()) < x.size for x in limits)]
    return len(busy) / max(prod(spec.batch[d] for d in dims), 1)
