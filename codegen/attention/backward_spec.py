"""The specification of the kernels of attention's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.attention.spec import AttentionSpec
from codegen.expr import Operand, Program
from codegen.spec import KernelSpec


@dataclass(frozen=True)
class AttentionBackwardSpec(KernelSpec):
    """Sums over keys of gradients for every query, or over queries for every key.

    With p[i, j] = exp(score[i, j] - lse[i]) and g[i, j] = p[i, j] * (weight(loss[i] . v[j]) - row_dot[i]):
    over queries  first[i] = factor * sum over j of g[i, j] * slope[i, j] * k[j]; scores[i, j] = g[i, j]
    over keys     first[j] = factor * sum over i of g[i, j] * slope[i, j] * q[i]; second[j] = sum over i of
                  weight(p[i, j]) * loss[i]

    attention   scores, and the weight if that is not the identity; its ``out`` is the loss.  The program has a second
                store, the slope, unless that is 1.
    over        "queries" or "keys".
    lse         the logarithm of the sum of the scores' exponentials; strides over batch + (row,).
    by_queries  None, or where the sums over keys are added up as well, without the factor: float32, strides over batch
                + (query, element of a key), packed.  Only the form that computes all gradients by one kernel has it.
    order       goes with by_queries: int32 in which blocks count (`backward_fused`), one more than tiles of queries.
    guarded     whether p is 0 where the lse is minus infinity, that is, where a query meets no key.
    row_dot     strides over batch + (row,).
    factor      any number.
    first       strides over batch + (query or key, element of a key); or None.
    second      strides over batch + (key, element of a value); or None.
    by_scores   strides over batch + (row, key); or None.
    shared      whether queries of the last batch dimension share their keys: results of keys are sums over them.
    """

    attention: AttentionSpec
    over: str
    lse: Operand
    row_dot: Operand
    factor: float
    first: Operand | None
    second: Operand | None
    by_scores: Operand | None = None
    shared: bool = False
    guarded: bool = True
    by_queries: Operand | None = None
    order: Operand | None = None

    @property
    def program(self) -> Program:
        return self.attention.program

    @property
    def loss(self) -> Operand:
        return self.attention.out

    @property
    def fused(self) -> bool:
        """Whether one kernel computes the gradients of queries and of keys."""
        return self.by_queries is not None

    @property
    def queries(self) -> bool:
        """Whether there is a result for every query; else for every key."""
        return self.over == "queries"

    @property
    def sloped(self) -> bool:
        return len(self.program.stores) > 1

    @property
    def with_loss(self) -> bool:
        """Whether products with the loss are needed: second alone is of probabilities."""
        return self.first is not None or self.by_scores is not None

    @property
    def rows(self) -> int:
        """The number of queries or keys that have results."""
        return self.attention.rows if self.queries else self.attention.keys

    @property
    def cols(self) -> int:
        """The number of keys or queries that are summed over."""
        return self.attention.keys if self.queries else self.attention.rows

    @property
    def arguments(self) -> tuple[Operand, ...]:
        """What the kernel reads besides the program's loads: its first arguments."""
        a = self.attention
        return (a.q, a.k, a.v, a.out, self.lse, self.row_dot)

    @property
    def written(self) -> tuple[Operand, ...]:
        every = self.first, self.second, self.by_scores, self.by_queries, self.order
        return tuple(op for op in every if op is not None)

    @property
    def rounded(self) -> tuple[Operand, ...]:
        """What is written, except what is rounded later."""
        return tuple(op for op in self.written if op not in (self.by_queries, self.order))

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch dimensions that results have."""
        return self.attention.batch[:-1] if self.summed > 1 else self.attention.batch

    @property
    def summed(self) -> int:
        """The number of queries that share a key, over which its results are summed."""
        return self.attention.batch[-1] if self.shared and not self.queries else 1

    def together(self, most: int) -> int:
        """Returns how many batches are worked on together: their tiles of columns, those that are shared counted once,
        have so many bytes at most.
        """
        a = self.attention
        shares = prod(n for n, step in zip(a.batch, a.k.strides) if step == 0) if self.queries else 1
        each = self.cols * (a.depth + a.width) * 2
        return max(1, min(prod(self.batch), most // max(each, 1)) * shares)

    @property
    def approximate(self) -> bool:
        """Whether approximate instructions cannot be seen in the results."""
        return not self.program.exact and all(op.dtype.itemsize <= 2 for op in self.rounded)
