"""Pool kernels for windows that have no element in common (`Space.apart`): a thread folds several, far from each other.

Nothing is gained by neighbouring windows of a thread.  Its windows are as far apart as a block has threads, so that
neighbouring threads read and write neighbours; the elements of all of them are in flight at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from codegen.buffers import Edge
from codegen.expr import Load
from codegen.iteration import coordinate, unsigned
from codegen.kernel import block_number
from codegen.pointwise.body import vector_type
from codegen.pool.renderer import PoolRenderer
from codegen.pool.steps import THREADS
from codegen.sizes import most
from codegen.spec import KernelSource


class ApartRenderer(PoolRenderer):
    """Writes kernels whose threads take windows that share nothing."""

    def render(self) -> KernelSource:
        edge = self._places()
        exists = "exists[r]" if edge.ragged else ""
        held = self._all(exists)
        with self._each_window():
            if exists:
                self.w.line(f"if (!{exists}) continue;")
            self._fixed_loads()
            self._declare_parts()
            with self.scope():
                self._fold(0, [], held)
            self._results()
        sizes = " x ".join(str(window.count) for _, window in self.windows)
        across = f", each of {self.s.vector} neighbours" if self.s.vector > 1 else ""
        details = f"windows of {sizes} that share nothing; a thread takes {self.s.each}{across}"
        return self.source(details, edge.tiles)

    @contextmanager
    def _each_window(self) -> Iterator[None]:
        """Writes the loop over a thread's windows."""
        with self.scope(), self.w.unrolled(f"for (int r = 0; r < {self.s.each}; ++r)"), self.scope():
            yield

    def _places(self) -> Edge:
        """Writes where the thread's windows are, and whether they exist; returns the windows in blocks."""
        w, s, outer, names = self.w, self.s, self.space.outer, self._coordinates()
        sizes = [*outer[:-1], outer[-1] // s.vector]
        edge, t = Edge(prod(sizes), THREADS * s.each), unsigned(self.t)
        w.line(f"const {t} first = {block_number(t)} * {edge.size} + threadIdx.x;")
        kept = [d for d, size in enumerate(sizes) if most(size) > 1]
        if kept:
            w.line(f"{self.t} {', '.join(f'{names[d]}[{s.each}]' for d in kept)};")
        if edge.ragged:
            w.line(f"bool exists[{s.each}];")
        with self._each_window():
            w.line(f"const {t} at = first + r * {THREADS};")
            if edge.ragged:
                w.line(f"exists[r] = {edge.inside('at')};")
            for d in kept:
                factor = f" * {s.vector}" if s.vector > 1 and d == len(sizes) - 1 else ""
                w.line(f"{names[d]}[r] = {coordinate('at', sizes, d)}{factor};")
        self.at = [f"{names[d]}[r]" if d in kept else "0" for d in range(len(sizes))]
        return edge

    def _all(self, exists: str) -> dict[int, str]:
        """Writes the reads of all elements under the thread's windows; returns their C names, by load."""
        w, counts = self.w, [window.count for _, window in self.windows]
        dims = "".join(f"[{count}]" for count in counts if count > 1)
        names = {n: self.names.unique(self.program.loads[n].name, "_under") for n in self.space.taps}
        for n, name in names.items():
            w.line(f"{vector_type(self.program.loads[n], self.count(n))} {name}[{self.s.each}]{dims};")
        at = "".join(f"[{self.tap(k)}]" for k, count in enumerate(counts) if count > 1)
        with self._each_window():
            conditions = [exists] if exists else []
            inside = self.inside(conditions + self.open_taps(0, len(self.windows)))
            for n, name in names.items():
                assert Load(n) in self.space.folded
                self.read(n, f"{name}[r]{at}", inside)
        return {n: f"{name}[r]{at}" for n, name in names.items()}
