"""The program on results that lie in fragments: the registers of warps as mma and wgmma leave them.

A fragment is 16 rows by 16 columns of a warp.  A thread has four pairs of neighbours along a row: pair f lies in row
lane / 4 + f % 2 * 8 and columns lane % 4 * 2 + f / 2 * 8 on.  Results leave in one of two ways:

direct  each thread runs the program on its pairs and writes them.
staged  the sums go to shared memory; then threads side by side run the program on results that are neighbours in
        memory, along columns or along rows, whichever the outputs are, with accesses of up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from codegen.buffers import Edge
from codegen.epilogue import Epilogue, Run, batches, in_order, one_access, placed
from codegen.expr import Operand, Program
from codegen.iteration import collapse, coordinates, extent, restrided, signed_index_type, split, widest_vector
from codegen.naming import Names, Writer
from codegen.partials import Sink
from codegen.spec import ContractionSpec, Limit

MOST_RUN = 16  # results that a thread handles together
MOST_PAD = 8  # sums of padding behind a row of staged sums

#: The C expression of sum e of a pair, given e and the product.
Sum: TypeAlias = Callable[[str, int], str]


@dataclass(frozen=True)
class Space:
    """A contraction's results, and its program over them, with dimensions merged where all operands allow it.

    batch, rows, cols  sizes of the results' dimensions.
    results  as in `ContractionSpec`: the program's row coordinates where they are not those of the rows.
    shape    sizes of the program's space.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    results: tuple[Limit, ...]
    shape: tuple[int, ...]
    program: Program

    @property
    def stores(self) -> tuple[Operand, ...]:
        return tuple(store.operand for store in self.program.stores)

    def along(self, *, by_rows: bool) -> int:
        """Returns the dimension of the program's space along which neighbours in rows, or in columns, lie."""
        return len(self.shape) - (1 if by_rows else 1 + len(self.cols))

    @property
    def index_type(self) -> str:
        """int32 if every position and offset fits it with room for a tile past the end, else int64."""
        count = prod((*self.batch, *self.rows, *self.cols))
        reach = [count, *(extent(self.shape, op.strides) for op in self.program.operands)]
        return signed_index_type(*reach)


def space(spec: ContractionSpec) -> Space:
    """Returns the space of a spec's results."""
    nb, program = len(spec.batch), spec.program
    every = program.strides
    count, last = len(every), nb + len(spec.results or spec.m)
    batch, over = collapse(spec.batch, [s[:nb] for s in every] + [x.batch for x in spec.results], range(nb))
    results = tuple(replace(x, batch=s) for x, s in zip(spec.results, over[count:]))
    rows, over_rows = spec.m, [s[nb:last] for s in every]
    if not results:
        rows, over_rows = collapse(rows, over_rows, range(len(rows)))
    cols, over_cols = collapse(spec.n, [s[last:] for s in every], range(len(spec.n)))
    new = [x + y + z for x, y, z in zip(over, over_rows, over_cols)]
    shape = (*batch, *(tuple(x.size for x in results) or rows), *cols)
    return Space(batch, rows, cols, results, shape, restrided(program, new))


@dataclass(frozen=True)
class Staging:
    """Where sums wait in shared memory: ``size`` rows (or columns) of ``length`` sums next to each other, and a pad.

    by_rows  whether neighbours lie along a row of the result, else along a column.
    run      neighbours that one thread takes out together.
    products sums of a place; those of each product lie together.
    """

    by_rows: bool
    size: int
    length: int
    run: int
    products: int = 1

    @staticmethod
    def name(product: int) -> str:
        """Returns the C variable of a product's sums."""
        return f"staged{product or ''}"

    @property
    def dims(self) -> str:
        # A warp writes pairs in 8 rows, or single sums in 4 x 2 columns: without bank conflicts if these start 8, or 4,
        # banks apart.
        return f"[{self.size}][{self.length + (MOST_PAD if self.by_rows else 4)}]"


def staging(at: Space, rows: int, cols: int, products: int = 1) -> Staging:
    """Returns how ``rows`` x ``cols`` sums, of so many products, are staged for the program of a space."""
    first = at.stores[0].strides
    by_rows = first[-1] == 1 or first[at.along(by_rows=False)] != 1 or not in_order(at.results, len(at.rows))
    length = cols if by_rows else rows
    along = at.along(by_rows=by_rows)
    sizes = (at.shape[along], (at.cols if by_rows else at.rows)[-1], length)

    def suits(run: int) -> bool:
        stores = [op for op in at.stores if run * op.dtype.itemsize <= 16]
        return not any(size % run for size in sizes) and any(one_access(op, at.shape, run, along) for op in stores)

    run = widest_vector(MOST_RUN, suits)
    return Staging(by_rows, rows if by_rows else cols, length, run, products)


class ResultFragments:
    """Writes the program on a tile of results; ``batch`` is the C variable of the tile's number in the batch.

    edges  the rows and the columns of results in tiles.
    total  C type of the sums in registers: float or int32.
    """

    def __init__(self, w: Writer, at: Space, names: Names, spec: ContractionSpec, edges: tuple[Edge, Edge]) -> None:
        self.w, self.at, self.edges = w, at, edges
        self.t = at.index_type
        self.epilogue = Epilogue(w, at.program, names, at.shape, spec.accumulate, spec.result)
        self._unsigned = spec.accumulate == "uint32"
        self._products = range(spec.products)
        #: C expressions of what the program sees behind the sums of a row m
        self.beside: list[str] = []
        self.total = "int32" if self._unsigned else "float"

    def batch(self) -> None:
        """Writes the coordinates of the batch; call it once for each tile."""
        if prod(self.at.batch) > 1 and len(self.at.batch) > 1:
            coordinates(self.w, self.t, "b", "batch", self.at.batch)

    def _at(self, m: str, n: str) -> None:
        """Writes the row and column of the first result, and skips it where it does not exist."""
        self.w.line(f"const {self.t} m = {m}, n = {n};")
        self.w.leave(self.edges[0].outside("m"), self.edges[1].outside("n"))

    def direct(self, m: str, n: str, total: Sum, sinks: Sequence[Sink] = ()) -> None:
        """Writes the program on pair ``f`` of a fragment, inside of a loop over its pairs.

        ``m`` and ``n`` are the row and column of its first result, ``total`` its sums.
        """
        w, pairs = self.w, Edge(self.edges[1].total, 2)
        self._at(m, n)
        sums = [self._sum(total("e", p)) for p in self._products]
        if self.at.cols[-1] % 2 == 0 or len(self.at.cols) == 1:
            missing = (lambda e: pairs.outside(f"n + {e}")) if pairs.ragged else None
            run = Run(2, len(self.at.shape) - 1, "e", missing)
            self.epilogue.results(self._existing(), [*sums, *self.beside], run, sinks=sinks)
            return
        with w.unrolled("for (int e = 0; e < 2; ++e)"):  # the two are in different rows of the columns' dimensions
            w.leave(pairs.outside("n + e"))
            self.epilogue.results(self._existing("n + e"), [*sums, *self.beside], None, sinks=sinks)

    def run(self, total: str, count: int) -> None:
        """Writes the program on ``count`` neighbours of row ``m``, from column ``n`` on, which all exist.

        ``total`` is the sum of element ``e``; columns are one dimension, or the innermost one holds whole runs.
        """
        run = Run(count, len(self.at.shape) - 1, "e")
        self.epilogue.results(self._existing(), [self._sum(total), *self.beside], run)

    def put(self, to: Staging, row: str, col: str, total: Sum) -> None:
        """Writes pair ``f``, whose first sum is at (row, col) of the tile, to the staging area."""
        w = self.w
        w.line(f"const int row = {row};")
        w.line(f"const int col = {col};")
        for p in self._products:
            name = to.name(p)
            if to.by_rows:
                left, right = (f"{side}{p or ''}" for side in ("left", "right"))
                w.line(f"const {self.total} {left} = {total('0', p)}, {right} = {total('1', p)};")
                w.line(f"store_shared(&{name}[row][col], Vector<{self.total}, 2>{{{{{left}, {right}}}}});")
            else:
                w.unrolled_line(f"for (int e = 0; e < 2; ++e) {name}[col + e][row] = {total('e', p)};")

    def take(self, source: Staging, threads: int, m: str, n: str, thread: str = "t") -> None:
        """Writes the program on staged sums, a run per thread; m and n are templates of the staged {r} and {c}.

        Operands of several runs are loaded first, without branches: each wait for memory is for all of them.
        """
        w, epilogue = self.w, self.epilogue
        runs = source.length // source.run
        every = source.size * runs
        run = Run(source.run, self.at.along(by_rows=source.by_rows), "e")
        slow, fast = ("r", "c") if source.by_rows else ("c", "r")
        times = f" * {source.run}" if source.run > 1 else ""

        def place() -> tuple[str, ...]:
            """Writes the place of run ``i``; returns the conditions under which it does not exist."""
            w.line(f"const int {slow} = i / {runs}, {fast} = i % {runs}{times};")
            w.line(f"const {self.t} m = {m.format(r='r', c='c')}, n = {n.format(r='r', c='c')};")
            return self.edges[0].outside("m"), self.edges[1].outside("n")

        def results(given: Mapping[int, str]) -> None:
            sums = [f"{source.name(p)}[{slow}][{fast}]" for p in self._products]
            if source.run > 1:
                for p, at in enumerate(sums):
                    w.line(f"const auto sums{p or ''} = load_shared<{source.run}>(&{at});")
                sums = [f"sums{p or ''}[e]" for p in self._products]
            epilogue.results(self._existing(), [*map(self._sum, sums), *self.beside], run, given=given)

        together = min(epilogue.together(run), -(-every // threads))
        if together == 1:
            w.line("#pragma unroll 2")
            with w.block(f"for (int i = {thread}; i < {every}; i += {threads})"):
                w.leave(*place())
                results({})
            return
        w.line("#pragma unroll 1")
        with w.block(f"for (int start = 0; start < {every}; start += {threads * together})"):
            vectors = {k: f"{name}[q]" for k, name in epilogue.declare(run, together).items()}
            loop, number = f"for (int q = 0; q < {together}; ++q)", f"const int i = start + q * {threads} + {thread};"
            behind = f"i >= {every}" if every % (threads * together) else ""
            with w.unrolled(loop):
                w.line(number)
                missing = place()
                position, outside = self._position()
                conditions = [c for c in (behind, *missing, *outside) if c]
                if conditions:
                    w.line(f"const bool inside = !({' || '.join(conditions)});")
                epilogue.bring(position, run, vectors, "inside" if conditions else "")
            with w.unrolled(loop):
                w.line(number)
                w.leave(behind, *place())
                results(vectors)

    def _position(self, n: str = "n") -> tuple[list[str], list[str]]:
        """Writes the program's coordinates of result (m, n); returns them, and the conditions under which it does not
        exist.
        """
        at = self.at
        batch = batches(at.batch)
        first, last = len(at.batch), len(at.shape) - len(at.cols)
        every = [*(op.strides for op in at.program.operands), *at.program.indices]
        by_rows = [x.outer for x in at.results] or [steps[first : first + len(at.rows)] for steps in every]
        rows, outside = split(self.w, self.t, "m_", "m", at.rows, by_rows), list[str]()
        if at.results:
            rows, outside = placed(self.w, self.t, at.results, [*zip(batch, at.batch)], [*zip(rows, at.rows)])
        return [*batch, *rows, *split(self.w, self.t, "n_", n, at.cols, [steps[last:] for steps in every])], outside

    def _existing(self, n: str = "n") -> list[str]:
        """Writes the program's coordinates of result (m, n), and skips it where it does not exist; returns them."""
        position, outside = self._position(n)
        self.w.leave(*outside)
        return position

    def _sum(self, text: str) -> str:
        return f"uint32({text})" if self._unsigned else text
