"""Products of float32 made by tensor cores: both operands are sums of three of bfloat16, and six products are made.

The first part has an element's upper 8 significant bits, the second the next 8, rounded, the third what is left: all 24
bits.  Left out are products below 2^-21 of the whole.  Tensor cores add up the terms of one stage and truncate; threads
add the sums of stages in float32.  What is not finite, too, comes out as in a sum of products of float32
(`device/bf16x6.cuh`).
"""

from __future__ import annotations

#: What operands are multiplied as, and the type of their parts.
BF16X6, PART = "bf16x6", "bfloat16"
PARTS = 3
#: Terms of a sum that tensor cores add up, and bytes of a part of as many.
TERMS = 32
ROW = 2 * TERMS
#: The parts of A and B that are multiplied, the smallest products first: what they make is hardly truncated.
SMALL = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1))
LARGE = ((0, 0),)
PRODUCTS = len(SMALL) + len(LARGE)
#: Terms from which on a sum is bounded by no more than in float32: see `fusegraph.report.bounds`.
LEAST_TERMS = 64
