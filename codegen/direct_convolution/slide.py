"""The slide form of direct convolution: depthwise convolutions whose channels are contiguous, without shared memory.

A thread has a few neighbouring channels of a few neighbouring columns of outputs, and slides down the image.  It loads
every row of its input once, some rows ahead, and adds it to the sums of all rows of outputs that it touches: each
element is converted once for all of them.  Weights and the sums of these rows are in registers.  What neighbouring
threads load as well comes from the L1 cache.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod

from codegen.buffers import Edge, every
from codegen.direct_convolution.renderer import Renderer
from codegen.direct_convolution.slide_schedule import SlideSchedule, columns, walk
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.epilogue import Run, one_access
from codegen.expr import Load
from codegen.iteration import coordinate, linear, packed


class Sliding(Renderer):
    """What forms share whose threads slide down over rows of outputs, ``cols`` columns of ``count`` results each."""

    cols: int
    count: int  # results of a column
    vector: int  # elements of the input of a column
    ahead: int

    def slide(self, row: str) -> None:
        """Writes the sums, and what becomes of them, row by row."""
        w, spec = self.w, self.spec
        self.walk = walk(spec, self.patch_rows, self.cols * self.count, self.ahead)
        stride, under = spec.stride[1], self.walk.under
        reach = (spec.taps[1] - 1) * spec.dilation[1]
        w.line(f"{spec.accumulate} sum[{self.walk.slots}][{self.cols}][{self.count}];")
        with w.scope():
            iy = "iy"
            if self.walk.whole:
                iy = step = self.loop("iy", under)
            else:
                w.line("#pragma unroll 1")
                w.open(f"for ({self.small} first = 0; first < {under}; first += {self.walk.period})")
                step = self.loop("step", self.walk.period)
                iy = self.constant("iy", linear([("first", 1), (step, 1)]), self.small)
                w.leave(Edge(under, self.walk.period).outside(iy), how="break")
            w.line(f"{spec.accumulate} under[{spec.taps[0]}][{spec.under(2, self.cols)}][{self.vector}];")
            self.read(step, iy)
            self._add(step, iy)
            # With the last row that it needs, a row of outputs is finished, and its registers are free again.
            above = linear([(iy, 1)], -reach)
            if under > 1:
                late = f"({linear([(step, 1)], (0 if self.walk.whole else self.walk.period) - reach)}) % {stride} != 0"
                w.leave(f"{iy} < {reach}" if reach else "", late if stride > 1 else "")
            p = "0" if self.patch_rows == 1 else above if stride == 1 else f"({above}) / {stride}"
            p = self.constant("p", p, self.small)
            down = linear([(row, 1), (p, 1)])
            w.leave(Edge(spec.out[1], self.patch_rows).outside(down), how="break")
            self.finish(down, "sum" + self._slot(p, f"({step} + {self.walk.period - reach}) / {stride}"))

    @abstractmethod
    def read(self, step: str, iy: str) -> None:
        """Writes the input row ``iy`` of the strip into the array ``under``."""

    @abstractmethod
    def finish(self, row: str, sums: str) -> None:
        """Writes the results of a row of outputs from its ``sums``."""

    def _slot(self, p: str, turning: str) -> str:
        """Returns the subscript of the sums of output row ``p`` of the strip."""
        return f"[{p}]" if self.walk.whole else f"[{turning} % {self.walk.slots}]"

    def _add(self, step: str, iy: str) -> None:
        """Writes the products of a row of the input, added to the sums of all outputs that it touches."""
        w, spec = self.w, self.spec
        stride, dilation = spec.stride[1], spec.dilation[1]
        with w.scope():
            kr = self.loop("kr", spec.taps[1])
            above = linear([(iy if self.walk.whole else step, 1), (kr, -dilation)])
            if self.walk.whole:
                conditions = [f"{above} < 0", f"{above} > {(self.patch_rows - 1) * stride}"]
                conditions += [f"({above}) % {stride} != 0"] * (stride > 1)
                if self.walk.under > 1:
                    w.leave(*conditions)
                slot = self._slot("0" if self.patch_rows == 1 else above if stride == 1 else f"({above}) / {stride}", "")
            else:
                turned = linear([(step, 1), (kr, -dilation)], self.walk.period * spec.taps[1])
                if stride > 1:
                    w.leave(f"({turned}) % {stride} != 0")
                if spec.taps[1] > 3:
                    w.leave(f"{iy} < {linear([(kr, dilation)])}", f"{iy} > {linear([(kr, dilation)], (self.patch_rows - 1) * stride)}")
                slot = self._slot("", f"({turned}) / {stride}")
            iz, ks, q, e = (self.loop(*x) for x in (("iz", spec.taps[0]), ("ks", spec.taps[2]), ("q", self.cols), ("e", self.count)))
            first = every(*(f"{at} == 0" for at in (kr, iz, ks) if at != "0"))
            total = f"sum{slot}[{q}][{e}]"
            w.line(f"if ({first}) {total} = 0;" if first else f"{total} = 0;")
            element = linear([(q, spec.stride[2]), (ks, spec.dilation[2])])
            w.line(f"{total} += weights[{iz}][{kr}][{ks}][{e}] * under[{iz}][{element}][{e if self.vector > 1 else 0}];")

    # ---- the columns under a thread's outputs

    def no_column(self, ix: str) -> str:
        """Returns the condition that no tap meets an input column under the outputs; empty if all do."""
        width, met = self.spec.under(2, self.cols), columns(self.spec, self.cols)
        if len(met) == width:
            return ""
        step = self.spec.dilation[2] if self.spec.taps[2] > 1 else self.spec.stride[2]
        return " && ".join(f"{ix} != {n}" for n in met) if len(met) * step != width + step - 1 else f"{ix} % {step} != 0"

    def column(self, ix: str) -> str:
        """Returns the condition that an input column exists; the middle ones always do."""
        spec, col = self.spec, self.at["col0"]
        last = (Edge(spec.out[2], self.cols).tiles - 1) * self.cols * spec.stride[2] - spec.before[2]
        low, high = spec.before[2], spec.sizes[2] - last
        if low <= 0 and high >= spec.under(2, self.cols):
            return ""
        place = linear([("in_w", 1), (ix, 1)])
        inside = self.exists(2, place)
        return f"({low} <= {ix} && {ix} < {high} || {inside})" if low < high else inside

    # ---- what a thread keeps

    def load_weights(self, group: str) -> None:
        """Writes the loads of a thread's filters, whole runs of memory at a time where they are contiguous."""
        w, spec = self.w, self.spec
        dims = (*spec.taps, self.count)
        w.line(f"{spec.accumulate} weights{''.join(f'[{n}]' for n in dims)};")
        run = self._weights_run()
        if run:
            w.line(f"Vector<{spec.w.dtype.ctype}, {run}> filters[{self.count * prod(spec.taps) // run}];")
            start = f"{self.weights} + {linear([(group, prod(spec.taps) * spec.filters)])}"
            count = self.count * prod(spec.taps) // run
            w.unrolled_line(f"for (int i = 0; i < {count}; ++i) filters[i] = load<{run}>({start} + i * {run});")
        with w.scope():
            taps = [self.loop(name, n) for name, n in zip(("kd", "kr", "ks"), spec.taps)]
            e = self.loop("e", self.count)
            if run:
                place = linear([(e, prod(spec.taps)), *zip((self._reversed(d, tap) for d, tap in enumerate(taps)), packed(spec.taps))])
                text = f"filters[({place}) / {run}][({place}) % {run}]"
                text = self.weight_value(text)
            else:
                channel, f = (linear([(group, 1), (e, 1)]), "0") if spec.filters == 1 else (group, e)
                text = self.weight(channel, f, "0", taps)
            w.line(f"weights[{']['.join(taps)}][{e}] = {text};")

    def _weights_run(self) -> int:
        """Returns how many elements of the filters one access has; 0 if they are not contiguous."""
        spec = self.spec
        sizes = (spec.groups, spec.filters, 1, *spec.taps)
        contiguous = all(a == b for a, b, n in zip(spec.w.strides, packed(sizes), sizes) if n > 1)
        size = spec.w.dtype.itemsize
        total = self.count * prod(spec.taps)
        # The first element of a thread is a multiple of all its elements.
        fitting = [n for n in (16, 8, 4, 2) if n * size <= 16 and total % n == 0 and spec.w.alignment % (n * size) == 0]
        return max(fitting, default=0) if contiguous else 0


class Slide(Sliding):
    barriers = False

    def __init__(self, spec: DirectConvolutionSpec, schedule: SlideSchedule) -> None:
        super().__init__(spec, schedule)
        self.s, self.cols, self.vector, self.ahead = schedule, schedule.cols, schedule.vector, schedule.ahead
        self.count = schedule.vector * spec.filters

    def describe(self) -> str:
        s = self.s
        return f"a thread slides down over {s.rows} rows of {s.cols} columns of {s.vector} channels, {s.ahead} ahead"

    def body(self) -> int:
        w, s, spec = self.w, self.s, self.spec
        sizes = (spec.images, spec.out[0], -(-spec.out[1] // s.rows), -(-spec.out[2] // s.cols), -(-spec.groups // s.vector))
        threads = Edge(prod(sizes), s.threads)
        w.line(f"const {self.t} at = {self.t}(blockIdx.x) * {s.threads} + threadIdx.x;")
        w.leave(threads.outside("at"), how="return")
        scales = (1, 1, s.rows, s.cols, s.vector)
        image, depth, row, col, group = self.places("at", sizes, "image depth row col group", scales)
        self.at = {"image": image, "depth": depth, "row0": row, "col0": col, "group": group}
        self.load_weights(group)
        fixed = {0: image, 1: group, 3: depth} if self.count == 1 else {0: image, 3: depth}
        self.epilogue.scalars({d: at for d, at in fixed.items()})
        self.given = self._channel_values(group)
        self._fetch()
        self.slide(row)
        return threads.tiles

    def _channel_values(self, group: str) -> dict[int, str]:
        """Writes the loads of what the program reads of the thread's channels, once; returns their C names."""
        w, spec, found = self.w, self.spec, {}
        if self.count == 1:
            return found
        along = 1 if spec.filters == 1 else 2
        for n, op in enumerate(spec.program.loads):
            if op.strides[along] and not op.strides[0] and not any(op.strides[3:]):
                name = found[n] = self.names.unique(op.name, "_c")
                start = f"{self.epilogue.pointers.loads[n]} + {linear([(group, op.strides[1])])}"
                if one_access(op, self.epilogue.space, self.count, along):
                    w.line(f"const auto {name} = load<{self.count}>({start});")
                else:
                    w.line(f"{op.dtype.ctype} {name}[{self.count}];")
                    w.each_element(self.count, f"{name}[e] = ({start})[{linear([('e', op.strides[along])])}];")
        return found

    def _fetch(self) -> None:
        """Writes a function that loads a row of the input, and the loads of the first rows."""
        w, spec, s = self.w, self.spec, self.s
        at, xs, ctype, width = self.at, spec.x.strides, spec.x.dtype.ctype, spec.under(2, s.cols)
        # The stride of a dimension of one element means nothing.
        steps = [step if many > 1 else 0 for step, many in zip(xs[3:], spec.sizes)]
        corner = [(at["image"], xs[0]), (at["group"], 1)]
        w.line(f"const {self.t} in_h = {self.source(1, at['row0'], '0')}, in_w = {self.source(2, at['col0'], '0')};")
        w.line(f"const {ctype}* corner = {self.x} + {linear(corner)} + {linear([('in_h', steps[1]), ('in_w', steps[2])])};")
        box = f"[{spec.taps[0]}][{width}]"
        w.line(f"Packed<{ctype}, {s.vector}> line[{s.ahead}]{box};")
        residues = {kr * spec.dilation[1] % spec.stride[1] for kr in range(spec.taps[1])}
        met = " || ".join(f"iy % {spec.stride[1]} == {n}" for n in sorted(residues))
        met = f"({met})" if len(residues) < spec.stride[1] else ""
        with (
            w.block(f"const auto fetch = [&](Packed<{ctype}, {s.vector}> (&into){box}, {self.small} iy)", "};"),
            w.scope(),
        ):
            exists = every(self.exists(1, "in_h + iy"), f"iy < {spec.under(1, s.rows)}", met)
            w.line(f"const bool row_exists = {exists};")
            iz = self.loop("iz", spec.taps[0])
            plane, there = self.source_depth(iz)
            ix = self.loop("ix", width)
            w.leave(self.no_column(ix))
            inside = every("row_exists", there, self.column(ix))
            start = linear([("corner", 1), ("iy", steps[1]), (ix, steps[2]), (plane, steps[0])])
            w.line(f"into[{iz}][{ix}] = load_if<{s.vector}>({inside}, {start});")
        w.unrolled_line(f"for (int iy = 0; iy < {s.ahead}; ++iy) fetch(line[iy], iy);")

    def read(self, step: str, iy: str) -> None:
        w, s, spec = self.w, self.s, self.spec
        line = f"line[{step} % {s.ahead}]" if s.ahead > 1 else "line[0]"
        with w.scope():
            iz, ix = self.loop("iz", spec.taps[0]), self.loop("ix", spec.under(2, s.cols))
            w.leave(self.no_column(ix))
            e = self.loop("e", s.vector)
            w.line(f"under[{iz}][{ix}][{e}] = {self.value(f'{line}[{iz}][{ix}][{e}]')};")
        more = self.walk.under > s.ahead
        if more:
            w.line(f"fetch({line}, {linear([(iy, 1)], s.ahead)});")

    def finish(self, row: str, sums: str) -> None:
        w, s, spec = self.w, self.s, self.spec
        with w.scope():
            q = self.loop("q", s.cols)
            across = linear([(self.at["col0"], 1), (q, 1)])
            w.leave(Edge(spec.out[2], s.cols).outside(across), how="break")
            element = "e" if self.count > 1 else "0"
            run = Run(self.count, 1 if spec.filters == 1 else 2, "e")
            # The channels of a thread all exist: its vector divides their number.
            position = [self.at["image"], self.at["group"], "0", self.at["depth"], row, across]
            self.epilogue.results(position, [f"{sums}[{q}][{element}]"], run, given=self.given)
