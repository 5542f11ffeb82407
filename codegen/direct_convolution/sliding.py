"""What forms of direct convolution share whose threads slide down the image.

A thread reads every row of its input once and adds it to the sums of all rows of outputs that it touches: each element
is converted once for all of them.  Weights and the sums of these rows are in registers.
"""

from __future__ import annotations

from abc import abstractmethod
from math import lcm, prod

from codegen.buffers import Edge
from codegen.declined import Declined
from codegen.direct_convolution.renderer import Renderer
from codegen.direct_convolution.slide_schedule import columns, keeps_phase, walk
from codegen.iteration import linear, packed
from codegen.sizes import least


class Sliding(Renderer):
    """A thread has the results of ``cols`` columns, ``count`` of each, of ``vector`` elements of the input."""

    cols: int
    count: int
    vector: int
    ahead: int

    def plan_walk(self) -> None:
        """Decides how the thread goes down, and writes where it begins: rows outside of the image add nothing."""
        spec = self.spec
        if not (keeps_phase(spec, 1, self.patch_rows) and keeps_phase(spec, 2, self.cols)):
            raise Declined("strips begin in several phases of the input")
        self.walk = walk(spec, self.patch_rows, self.cols * self.count, self.ahead)
        self.trimmed = self.walk.trimmed
        if self.trimmed:
            low = f"in_h < 0 ? min(-in_h, {self.reach}) : 0"
            self.w.line(f"{self.small} begin = {low}, end = min({spec.sizes[1]} - in_h, {self.walk.under});")

    @property
    def reach(self) -> int:
        """Rows from the first to the last one that a row of outputs needs."""
        return (self.spec.taps[1] - 1) * self.spec.dilation[1]

    def slide(self, row: str) -> None:
        """Writes the sums, and what becomes of them, row by row."""
        w, spec = self.w, self.spec
        under, period = self.walk.under, self.walk.period
        begin, end = ("begin", "end") if self.trimmed else ("0", str(under))
        if self.trimmed:
            self._infinite_weights()
        # Sums that nothing is made of have a value, too: NVRTC takes what is not set for whatever suits it, also later.
        start = "" if self.walk.whole else " = {}"
        w.line(f"{spec.accumulate} sum[{self.walk.slots}][{self.cols}][{self.count}]{start};")
        with w.scope():
            if self.walk.whole:
                iy = step = self.loop("iy", under)
            else:
                w.line("#pragma unroll 1")
                w.open(f"for ({self.small} first = {begin}; first < {end}; first += {period})")
                step = self.loop("step", period)
                iy = self.constant("iy", linear([("first", 1), (step, 1)]), self.small)
                w.leave(Edge(under, period).outside(iy), how="break")
            self._begin(step)
            w.line(f"{spec.accumulate} under[{spec.taps[0]}][{spec.under(2, self.cols)}][{self.vector}];")
            with w.guarded(self.met_row(step)):
                self.read(step, iy)
            self.refill(step, iy)
            with w.guarded(self.met_row(step)), w.scope():
                self._add(step, iy)
            self._finished(row, step, iy)
        if self.trimmed:
            w.line("#pragma unroll 1")
            with w.block(f"for ({self.small} iy = max(begin, end); iy < {under}; ++iy)"):
                self._begin("0")
                self._finished(row, "0", "iy")

    def _finished(self, row: str, step: str, iy: str) -> None:
        """Writes what becomes of a row of outputs behind the last input row that it needs: its registers are free."""
        w, spec, reach, period = self.w, self.spec, self.reach, self.walk.period
        stride = spec.stride[1]
        if self.walk.under > 1 and stride > 1:
            w.leave(f"({linear([(step, 1)], period - period % stride - reach % stride)}) % {stride} != 0")
        with w.guarded(f"{iy} >= {reach}" if reach else ""):
            p = self.constant("p", self._over(linear([(iy, 1)], -reach)), self.small)
            down = linear([(row, 1), (p, 1)])
            w.leave(Edge(spec.out[1], self.patch_rows).outside(down), how="break")
            self.finish(down, f"sum[{p if self.walk.whole else 0}]")
        if not self.walk.whole and self.walk.slots > 1:
            sizes = (("q", self.cols), ("e", self.count))
            every = [f"for (int {name} = 0; {name} < {n}; ++{name})" for name, n in sizes]
            with w.unrolled(f"for (int k = 1; k < {self.walk.slots}; ++k)", *every):
                w.line("sum[k - 1][q][e] = sum[k][q][e];")

    @abstractmethod
    def read(self, step: str, iy: str) -> None:
        """Writes the input row ``iy`` of the strip into the array ``under``."""

    def refill(self, step: str, iy: str) -> None:
        """Writes what is done once a row of the input has been read."""

    @abstractmethod
    def finish(self, row: str, sums: str) -> None:
        """Writes the results of a row of outputs from its ``sums``."""

    def _over(self, iy: str) -> str:
        """Returns the row of outputs whose input begins in a row."""
        stride = self.spec.stride[1]
        return "0" if self.patch_rows == 1 else iy if stride == 1 else f"({iy}) / {stride}"

    def _infinite_weights(self) -> None:
        """Writes that no row is left out with weights whose products with the zeros outside of the image are not 0."""
        w, spec = self.w, self.spec
        if spec.accumulate not in ("float", "double"):
            return
        w.line(f"{spec.accumulate} zero = 0;  // NaN if a weight is infinite or NaN")
        with w.scope():
            taps = [self.loop(name, n) for name, n in zip(("kd", "kr", "ks"), spec.taps)]
            w.line(f"zero += 0 * weights[{']['.join(taps)}][{self.loop('e', self.count)}];")
        with w.block("if (zero != 0)"):
            w.line(f"begin = 0, end = {self.walk.under};")
            self.restart()

    def restart(self) -> None:
        """Writes what the first row of the strip needs where that has not been the first one so far."""

    def _begin(self, step: str) -> None:
        """Writes the first values of the sums of a row of outputs, where its input begins."""
        w, stride = self.w, self.spec.stride[1]
        conditions = [f"{step} % {stride} == 0"] * (stride > 1)
        if self.walk.whole:
            conditions += [f"{step} <= {(self.patch_rows - 1) * stride}"] * (self.walk.under > 1)
        with w.guarded(*(conditions if step != "0" else ())), w.scope():
            q, e = self.loop("q", self.cols), self.loop("e", self.count)
            w.line(f"sum[{self._over(step) if self.walk.whole else self.walk.slots - 1}][{q}][{e}] = 0;")

    def _add(self, step: str, iy: str) -> None:
        """Writes the products of a row of the input, added to the sums of all outputs that it touches."""
        w, spec = self.w, self.spec
        stride, dilation = spec.stride[1], spec.dilation[1]
        last, reach = (self.patch_rows - 1) * stride, (spec.taps[1] - 1) * dilation
        kr = self.loop("kr", spec.taps[1])
        if self.walk.whole:
            below = linear([(iy, 1), (kr, -dilation)])
            if self.walk.under > 1:
                outside = [f"{below} < 0", f"{below} > {last}", f"({below}) % {stride} != 0" if stride > 1 else ""]
                w.leave(*outside)
            slot = self._over(below)
        else:
            # The first slot is that of the first row of outputs that is not finished.
            phase = f"{step} % {stride}" if stride > 1 else "0"
            below = linear([(kr, dilation), (phase, -1)])
            w.leave(f"({below}) % {stride} != 0" if stride > 1 else "")
            slot = (
                f"({reach} - {phase}) / {stride} - ({below}) / {stride}"
                if stride > 1
                else linear([(kr, -dilation)], reach)
            )
        slot = f"[{slot}]"
        iz, ks, q = self.loop("iz", spec.taps[0]), self.loop("ks", spec.taps[2]), self.loop("q", self.cols)
        column = linear([(q, spec.stride[2]), (ks, spec.dilation[2])])
        if spec.input_dilation[2] > 1:
            w.leave(f"({column}) % {spec.input_dilation[2]} != {self._residue(2)}")
        e = self.loop("e", self.count)
        value = f"under[{iz}][{column}][{e if self.vector > 1 else 0}]"
        w.line(f"sum{slot}[{q}][{e}] += weights[{iz}][{kr}][{ks}][{e}] * {value};")

    # ---- what of the input is under a thread's outputs

    def _residue(self, axis: int) -> int:
        """Returns which rows (or columns) under the outputs the dilated input has elements in: these modulo dilation.

        A thread's first row and column of outputs is a multiple of the dilation.
        """
        return self.spec.before[axis] % self.spec.input_dilation[axis]

    def origin(self, axis: int, out: str) -> str:
        """Returns the input coordinate of the first row (or column) under the outputs that is one of the input."""
        spec, apart = self.spec, self.spec.input_dilation[axis]
        if apart == 1:
            return self.source(axis, out, "0")
        first = (self._residue(axis) - spec.before[axis]) // apart
        return linear([(out if out == "0" else f"({out} / {apart})", 1)], first)

    def along(self, axis: int, under: str) -> str:
        """Returns how many elements of the input behind the first one a row (or column) under the outputs is."""
        apart = self.spec.input_dilation[axis]
        return under if apart == 1 else f"{under} / {apart}"

    def source_depth(self, iz: str) -> tuple[str, str]:
        in_d, there = super().source_depth(iz)
        apart = self.spec.input_dilation[0]
        if apart == 1:
            return in_d, there
        return f"({in_d} / {apart})", f"{in_d} % {apart} == 0 && {self.exists(0, f'{in_d} / {apart}')}"

    def met_row(self, iy: str) -> str:
        """Returns the condition that a row under the outputs is one of the input and meets taps; empty if all do."""
        spec = self.spec
        stride, apart = spec.stride[1], spec.input_dilation[1]
        every, own = lcm(stride, apart), self._residue(1)
        starts = {kr * spec.dilation[1] % stride for kr in range(spec.taps[1])}
        met = [n for n in range(every) if n % apart == own and n % stride in starts]
        if len(met) == every or (iy == "0" and 0 in met):
            return ""
        return " || ".join(f"{iy} % {every} == {n}" for n in met) or "false"

    def no_column(self, ix: str) -> str:
        """Returns the condition that no tap meets an input column under the outputs; empty if all do."""
        met = columns(self.spec, self.cols)
        if len(met) == self.spec.under(2, self.cols):
            return ""
        every = "0x" + format(sum(1 << n for n in met), "x")
        return f"!({every}ull >> {ix} & 1)"

    def column(self, ix: str) -> str:
        """Returns the condition that an input column exists; the middle ones always do."""
        spec, col, apart = self.spec, self.at["col0"], self.spec.input_dilation[2]
        before = (spec.before[2] - self._residue(2)) // apart
        last = (Edge(spec.out[2], self.cols).tiles - 1) * self.cols * spec.stride[2] // apart - before
        low, high = before * apart, least(spec.sizes[2] - last) * apart
        if low <= 0 and high >= spec.under(2, self.cols):
            return ""
        place = linear([("in_w", 1), (self.along(2, ix), 1)])
        if col == "0" and ix == "0":
            return "true" if low <= 0 < high else "false"
        return f"({low} <= {ix} && {ix} < {high} || {self.exists(2, place)})" if low < high else self.exists(2, place)

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
                own = (self._reversed(d, tap) for d, tap in enumerate(taps))
                place = linear([(e, prod(spec.taps)), *zip(own, packed(spec.taps))])
                text = self.weight_value(f"filters[({place}) / {run}][({place}) % {run}]")
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
