"""The strips form of direct convolution: unstrided filters over planes whose rows are contiguous, without shared
memory.

A thread takes as many neighbouring columns as one 16-byte access has, and several rows of them.  It issues the loads of
all input rows under its outputs at once, each with the few elements to its left and right that the filter reaches
(which its neighbours load too: they come from the L1 cache), and keeps them in registers: no input element is read
twice from device memory, and the rows between two threads' patches come from the L2 cache.
"""

from __future__ import annotations

from math import prod

from codegen.buffers import Edge, every
from codegen.direct_convolution.renderer import Renderer
from codegen.direct_convolution.schedule import StripsSchedule, halo
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.iteration import linear


class Strips(Renderer):
    barriers = False

    def __init__(self, spec: DirectConvolutionSpec, schedule: StripsSchedule) -> None:
        super().__init__(spec, schedule)
        self.s = schedule

    def describe(self) -> str:
        return f"a thread {self.s.rows} x {self.s.vector} outputs"

    def body(self) -> int:
        w, s, spec = self.w, self.s, self.spec
        rows, cols = Edge(spec.out[1], s.rows), Edge(spec.out[2], s.vector)
        sizes = (spec.images, spec.groups, spec.out[0], rows.tiles, cols.tiles)
        strips = Edge(prod(sizes), s.threads)
        w.line(f"const {self.t} at = {self.t}(blockIdx.x) * {s.threads} + threadIdx.x;")
        w.leave(strips.outside("at"), how="return")
        scales = (1, 1, 1, s.rows, s.vector)
        image, group, depth, row, col = self.places("at", sizes, "image group depth row col", scales)
        self.at["depth"] = depth
        deep = spec.taps[0] > 1
        if not deep:
            self._read(image, group, row, col, "0")
        w.line()
        self.epilogue.scalars()
        w.line(f"{spec.accumulate} sum[{spec.filters}][{s.rows}][{s.vector}] = {{}};")
        reach = (spec.taps[1] - 1) * spec.dilation[1]

        def finish(p: str) -> None:
            down = self.patch_row(row, p)
            f = self.loop("f", spec.filters)
            sums = [f"sum[{f}][{p}][q]"]
            self.epilogue.results([image, group, f, depth, down, col], sums, self.columns(col, s.vector))

        with w.scope():
            if deep:
                self._read(image, group, row, col, self.loop("iz", spec.taps[0], unroll=False))
            # Input rows pass by from above.  With the last row that it needs, an output row is finished, and the
            # registers of its sums are free again.
            iy = self.loop("iy", s.rows + reach)
            self._add(iy)
            if not deep:
                p = linear([(iy, 1)], -reach) if s.rows > 1 else "0"
                if reach:
                    w.line(f"if ({iy} < {reach}) continue;")
                    p = self.constant("p", p, self.small)
                finish(p)
        if deep:
            with w.scope():
                finish(self.loop("p", s.rows))
        return strips.tiles

    def _read(self, image: str, group: str, row: str, col: str, iz: str) -> None:
        """Writes the loads of a plane of taps, and of what lies under it in the input."""
        self._weights(group, iz)
        self._load(image, group, row, col, iz)

    def _weights(self, group: str, iz: str) -> None:
        w, spec = self.w, self.spec
        w.line(f"{spec.accumulate} weights[{spec.filters}][{spec.taps[1]}][{spec.taps[2]}];")
        with w.scope():
            f, kr, ks = self.loop("f", spec.filters), self.loop("kr", spec.taps[1]), self.loop("ks", spec.taps[2])
            w.line(f"weights[{f}][{kr}][{ks}] = {self.weight(group, f, '0', (iz, kr, ks))};")

    def _load(self, image: str, group: str, row: str, col: str, iz: str) -> None:
        """Writes the loads of all input rows under the patch, in a plane of the input."""
        w, s, spec, t = self.w, self.s, self.spec, self.t
        left, right = halo(spec)
        count, xs, ctype = spec.under(1, s.rows), spec.x.strides, spec.x.dtype.ctype
        w.line()
        in_d, inside = self.source_depth(iz)
        where = [(image, xs[0]), (group, xs[1]), (in_d, xs[3]), (row, xs[4]), (col, 1)]
        w.line(f"const {ctype}* corner = {self.x} + {linear(where)};")
        w.line(f"Strip<{ctype}, {left}, {s.vector}, {right}> line[{count}];")
        with w.scope():
            iy = self.loop("iy", count)
            below = linear([(iy, 1)], -spec.before[1])
            place = linear([(below if below.isalnum() else f"({below})", xs[4])])
            start = "corner" if place == "0" else f"corner + {place}"
            exists = every(inside, self.exists(1, self.source(1, row, iy)))
            columns = f"{t}({col}), {t}({spec.sizes[2]})"
            w.line(f"line[{iy}] = load_strip<{left}, {s.vector}, {right}>({exists}, {start}, {columns});")

    def _add(self, iy: str) -> None:
        """Writes the products of an input row, added to the sums of all outputs that it touches."""
        w, s, spec = self.w, self.s, self.spec
        width = sum(halo(spec)) + s.vector
        w.line(f"{spec.accumulate} under[{width}];")
        with w.scope():
            ix = self.loop("ix", width)
            w.line(f"under[{ix}] = {self.value(f'line[{iy}][{ix}]')};")
        with w.scope():
            p = self.loop("p", s.rows)
            kr = self.tap(1, iy, p) if iy != "0" else "0"
            f, ks, e = self.loop("f", spec.filters), self.loop("ks", spec.taps[2]), self.loop("e", s.vector)
            element = linear([(e, 1), (ks, spec.dilation[2])])
            w.line(f"sum[{f}][{p}][{e}] += weights[{f}][{kr}][{ks}] * under[{element}];")
