"""The error of float32 products that tensor cores make of bfloat16 parts (`codegen.bf16x6`).

Let S be the sum of |a||b| over a stage, and u = 2^-24.  Parts of x are at most |x|, 2^-7 |x| and 2^-15 |x|, so that

- what is left out (second times third part, third times third) is at most (2 * 2^-22 + 2^-30) S, about 8 u S;
- the five smaller products together are at most (2 * 2^-7 + 2^-14 + 2 * 2^-15) S, below 0.0167 S;
- one instruction aligns 16 products and the sum so far to the largest of these, cuts each off below 2^-24 of it, and
  cuts off the result: it loses at most 17 + 2 times u of the magnitudes that it has met.  Ten instructions of a stage
  make the smaller products, two the largest;
- each stage is added with one rounding, u of the sum of all |a||b|.

So a sum of K terms is within (8.1 + 10 * 19 * 0.0167 + 2 * 19 * 1.0167 + K / 32) u of sum |a||b|, while one of K
multiply-adds in float32 is within K u (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from codegen.bf16x6 import LARGE, SMALL, TERMS
from fusegraph.ops.base import Array

#: Terms that an instruction adds to a sum, and the rounding units that it loses of the magnitudes.
AT_ONCE = 16
LOST = AT_ONCE + 1 + 2
#: Shares of the magnitudes: what is left out, in rounding units, and the five smaller products.
LEFT_OUT, SMALLER = 8.1, 0.0167
#: Elements below the first of these lose what is below the second.
FULL, LEAST = 2.0**-110, 2.0**-133


def units(terms: int) -> float:
    """Returns the bound on the error of a sum of products, in rounding units of float32 times the sum of |a||b|."""
    steps = TERMS // AT_ONCE
    small, large = LOST * steps * len(SMALL) * SMALLER, LOST * steps * len(LARGE) * (1 + SMALLER)
    found: float = LEFT_OUT + small + large + -(-terms // TERMS)
    return found


def underflow(a: Array, b: Array, sums: Callable[[Array, Array], Array]) -> Array:
    """Returns how far sums of products may be off because of elements so small that their third part underflows.

    ``a`` and ``b`` are magnitudes, of which ``sums`` sums up products.
    """

    def lost(x: Array) -> Array:
        return (x > 0) & (x < FULL)

    error = np.zeros(())
    if (of_a := lost(a)).any():
        error = error + sums(np.where(of_a, LEAST, 0.0), b)
    if (of_b := lost(b)).any():
        error = error + sums(a, np.where(of_b, LEAST, 0.0))
    return error
