"""The strips form of direct convolution: unstrided filters over planes whose rows are contiguous, without shared
memory.

A thread takes as many neighbouring columns as one 16-byte access has, and several rows of them.  It issues the loads of
all input rows under its outputs at once, each with the few elements to its left and right that the filter reaches
(which its neighbours load too: they come from the L1 cache), and keeps them in registers: no input element is read
twice from device memory, and the rows between two threads' patches come from the L2 cache.
"""

from __future__ import annotations

from codegen.direct_convolution.renderer import Renderer
from codegen.direct_convolution.schedule import StripsSchedule, halo
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.epilogue import Run, operand_value
from codegen.iteration import coordinate, linear, unsigned


class Strips(Renderer):
    barriers = False

    def __init__(self, spec: DirectConvolutionSpec, schedule: StripsSchedule) -> None:
        super().__init__(spec, schedule)
        self.s = schedule

    def describe(self) -> str:
        return f"a thread {self.s.rows} x {self.s.vector} outputs"

    def body(self) -> int:
        w, s, spec, c, t = self.w, self.s, self.spec, self.spec.accumulate, self.t
        sizes = (spec.images, spec.groups, -(-spec.out[1] // s.rows), -(-spec.out[2] // s.vector))
        total = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        w.line(f"const {t} at = {t}(blockIdx.x) * {s.threads} + threadIdx.x;")
        if total % s.threads:
            w.line(f"if (at >= {total}) return;")
        scales = (1, 1, s.rows, s.vector)
        places = []
        for d, (name, scale) in enumerate(zip(("image", "group", "row", "col"), scales)):
            where = f"{coordinate('at', sizes, d)}{f' * {scale}' if scale > 1 else ''}"
            places.append(self.constant(name, where) if sizes[d] > 1 else "0")
        image, group, row, col = places
        self._weights(group)
        lines = self._load(image, group, row, col)
        w.line()
        self.epilogue.scalars()
        w.line(f"{c} sum[{spec.filters}][{s.rows}][{s.vector}] = {{}};")
        with w.scope():
            reach = (spec.taps[1] - 1) * spec.dilation[1]
            # Input rows pass by from above.  With the last row that it needs, an output row is finished, and the
            # registers of its sums are free again.
            iy = self.loop("iy", s.rows + reach)
            left, right = halo(spec)
            width = left + s.vector + right
            w.line(f"{c} under[{width}];")
            with w.scope():
                ix = self.loop("ix", width)
                w.line(f"under[{ix}] = {operand_value(spec.x, f'{lines}[{iy}][{ix}]', c)};")
            with w.scope():
                p = self.loop("p", s.rows)
                kr = self.tap_row(iy, p) if iy != "0" else "0"
                f, ks, e = self.loop("f", spec.filters), self.loop("ks", spec.taps[2]), self.loop("e", s.vector)
                element = linear([(e, 1), (ks, spec.dilation[2])])
                w.line(f"sum[{f}][{p}][{e}] += weights[{f}][{kr}][{ks}] * under[{element}];")
            done = linear([(iy, 1)], -reach)
            if reach:
                w.line(f"if ({iy} < {reach}) continue;")
            if s.rows > 1 and reach:
                w.line(f"const {self.small} p = {done};")
            p = "p" if s.rows > 1 and reach else done if s.rows > 1 else "0"
            down = linear([(row, 1), (p, 1)])
            if spec.out[1] % s.rows:
                w.line(f"if ({down} >= {spec.out[1]}) break;")
            f = self.loop("f", spec.filters)
            beyond = None if spec.out[2] % s.vector == 0 else lambda e: f"{linear([(col, 1), (e, 1)])} >= {spec.out[2]}"
            run = Run(s.vector, 5, "q", beyond)
            self.epilogue.results([image, group, f, "0", down, col], [f"sum[{f}][{p}][q]"], run)
        return -(-total // s.threads)

    def _weights(self, group: str) -> None:
        w, spec, c = self.w, self.spec, self.spec.accumulate
        w.line(f"{c} weights[{spec.filters}][{spec.taps[1]}][{spec.taps[2]}];")
        with w.scope():
            f, kr, ks = self.loop("f", spec.filters), self.loop("kr", spec.taps[1]), self.loop("ks", spec.taps[2])
            strides = spec.w.strides
            terms = [(group, strides[0]), (f, strides[1])]
            terms += [(self.reversed_tap(1, kr), strides[4]), (self.reversed_tap(2, ks), strides[5])]
            w.line(f"weights[{f}][{kr}][{ks}] = {operand_value(spec.w, f'{self.weights}[{linear(terms)}]', c)};")

    def _load(self, image: str, group: str, row: str, col: str) -> str:
        """Writes the loads of all input rows under the patch; returns the C name of the array."""
        w, s, spec, t = self.w, self.s, self.spec, self.t
        left, right = halo(spec)
        count = spec.under(1, s.rows)
        xs = spec.x.strides
        w.line()
        where = [(image, xs[0]), (group, xs[1]), (row, xs[4]), (col, 1)]
        w.line(f"const {spec.x.dtype.ctype}* corner = {self.x} + {linear(where)};")
        w.line(f"Strip<{spec.x.dtype.ctype}, {left}, {s.vector}, {right}> line[{count}];")
        with w.scope():
            iy = self.loop("iy", count)
            exists = f"{unsigned(t)}({linear([(row, 1), (iy, 1)], -spec.before[1])}) < {spec.sizes[1]}"
            place = linear([(_enclosed(linear([(iy, 1)], -spec.before[1])), xs[4])])
            start = "corner" if place == "0" else f"corner + {place}"
            columns = f"{t}({col}), {t}({spec.sizes[2]})"
            w.line(f"line[{iy}] = load_strip<{left}, {s.vector}, {right}>({exists}, {start}, {columns});")
        return "line"


def _enclosed(text: str) -> str:
    return text if text.isalnum() else f"({text})"
