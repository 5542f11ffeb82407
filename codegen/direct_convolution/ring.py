"""The ring form of direct convolution: depthwise convolutions whose channels are contiguous, at the speed of memory.

A block walks down the image.  Rows of the input lie in a ring in shared memory; while a few rows of outputs are
computed from the ring, the input rows of the next ones are copied to it (cp.async), so that enough bytes are in flight
without taking registers.  A block as wide and as high as the image reads every input element exactly once.  Threads
side by side take neighbouring channels; a thread computes a patch of rows x columns of its channels with its weights in
registers.
"""

from __future__ import annotations

from math import prod

from codegen.direct_convolution.renderer import Renderer
from codegen.direct_convolution.ring_schedule import RingSchedule, ring_bytes, ring_registers, ring_shape
from codegen.direct_convolution.schedule import SM_REGISTERS
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.epilogue import Run, operand_value
from codegen.iteration import coordinate, linear, unsigned


class Ring(Renderer):
    def __init__(self, spec: DirectConvolutionSpec, schedule: RingSchedule) -> None:
        super().__init__(spec, schedule)
        self.s = schedule
        self.dynamic_shared_bytes = ring_bytes(spec, schedule)

    def blocks_per_sm(self) -> int | None:
        """Returns how many blocks a multiprocessor should hold; None, ptxas's own choice, measured best for small
        filters.

        Elsewhere ptxas spills to fit one more block.
        """
        spec, s = self.spec, self.s
        if spec.word > 4:
            return 1
        if prod(spec.taps) <= 9 and s.vector > 1:
            return None
        return max(1, SM_REGISTERS // (self.threads * min(255, 2 * ring_registers(spec, s))))

    def describe(self) -> str:
        s = self.s
        at_once = f"{s.rows} x {s.out_cols} outputs of {s.channels} channels"
        return f"a block walks down by {at_once}, a thread {s.rows} x {s.cols} of {s.vector}"

    def body(self) -> int:
        w, s, spec, c, t = self.w, self.s, self.spec, self.spec.accumulate, self.t
        blocks = self.locate(
            [
                ("image", spec.images, 1),
                ("channel0", -(-spec.groups // s.channels), s.channels),
                ("row0", -(-spec.out[1] // s.block_rows), s.block_rows),
                ("col0", -(-spec.out[2] // s.out_cols), s.out_cols),
            ]
        )
        small = self.small
        shape = (s.across, s.lanes)
        places = [coordinate("threadIdx.x", shape, d) if shape[d] > 1 else "0" for d in (1, 0)]
        lane = self.constant("lane", linear([(places[0], s.vector)]), small)
        tx = self.constant("tx", linear([(places[1], s.cols)]), small)
        group = self.constant("group", linear([(self.at["channel0"], 1), (lane, 1)]))
        col = self.constant("col", linear([(self.at["col0"], 1), (tx, 1)]))
        self._declare_ring()
        self._fetch()
        self._first_fetches()
        self._weights(group)
        w.line()
        self.epilogue.scalars()
        steps = str(s.steps)
        if spec.out[1] % s.block_rows:
            steps = "steps"
            whole = linear([(self.at["row0"], 1)], s.block_rows)
            rest = f"({spec.out[1] + s.rows - 1} - {self.at['row0']}) / {s.rows}"
            if self.at["row0"] == "0":
                rest = str(-(-spec.out[1] // s.rows))
            w.line(f"const {t} steps = {whole} <= {spec.out[1]} ? {s.steps} : {rest};")
        w.line(f"{small} first = 0;  // where in the ring the rows under the outputs begin")
        w.line("#pragma unroll 1")
        with w.block(f"for ({t} step = 0; step < {steps}; ++step)"):
            w.line(f"copy_async_wait<{s.ahead - 1}>();")
            w.line("__syncthreads();  // the rows are there for all, and all are done with those before")
            w.line(f"if (step + {s.ahead} < {steps}) {self._fetches(s.rows * spec.stride[1])}")
            w.line("copy_async_commit();")
            w.line(f"{c} sum[{s.rows}][{s.cols}][{s.vector}] = {{}};")
            self._slide(lane, tx)
            self._results(group, col)
            slots, advance = ring_shape(spec, s)[0], s.rows * spec.stride[1]
            w.line(f"first = {_wrapped(f'first + {advance}', slots)};")
        return blocks

    def _declare_ring(self) -> None:
        w, spec, s = self.w, self.spec, self.s
        box = "".join(f"[{size}]" for size in ring_shape(spec, s))
        ctype = spec.x.dtype.ctype
        w.line()
        w.line("FUSEGRAPH_DYNAMIC_SHARED(shared);")
        w.line(f"auto& ring = *reinterpret_cast<{ctype}(*){box}>(shared);  // rows of the input")
        w.line(f"{self.small} put = 0;  // where in the ring the next row goes")
        w.line(f"{self.t} in_h = {self.source(1, self.at['row0'], '0')};")

    def _fetch(self) -> None:
        """Writes a function that starts the copy of the next input row; columns and rows outside the image
        become zero.
        """
        w, spec, s, t = self.w, self.spec, self.s, self.t
        slots, columns, channels = ring_shape(spec, s)
        size = spec.x.dtype.itemsize
        lanes = channels // s.copy
        image = spec.x.strides[0]
        # The stride of a dimension of one element means nothing: it need not keep addresses aligned.
        along, across = (stride if many > 1 else 0 for stride, many in zip(spec.x.strides[4:], spec.sizes[1:]))
        with w.block("const auto fetch = [&]", "};"):
            w.line(f"const bool inside = {unsigned(t)}(in_h) < {spec.sizes[1]};")
            own = linear([(f"threadIdx.x % {lanes}", s.copy)]) if lanes > 1 else "0"
            strip = self.constant("strip", own, self.small)
            exists = ["inside"]
            if spec.groups % s.channels:
                exists.append(f"{linear([(self.at['channel0'], 1), (strip, 1)])} < {spec.groups}")
            exists.append(f"{unsigned(t)}(in_w) < {spec.sizes[2]}")
            terms = [(self.at["image"], image), ("in_h", along), (self.at["channel0"], 1), (strip, 1)]
            w.line(f"const {spec.x.dtype.ctype}* row = {self.x} + {linear(terms)};")
            start = f"threadIdx.x / {lanes}" if lanes > 1 else "threadIdx.x"
            with w.unrolled(f"for ({self.small} ix = {start}; ix < {columns}; ix += {s.threads // lanes})"):
                w.line(f"const {t} in_w = {self.source(2, self.at['col0'], 'ix')};")
                source = f"row + {linear([('in_w', across)])}" if across else "row"
                valid = f"{' && '.join(exists)} ? {s.copy * size} : 0"
                w.line(f"copy_async<{s.copy * size}>(&ring[put][ix][{strip}], {source}, {valid});")
            w.line(f"put = {_wrapped('put + 1', slots)};")
            w.line("++in_h;")

    def _fetches(self, count: int) -> str:
        return "fetch();" if count == 1 else f"for (int k = 0; k < {count}; ++k) fetch();"

    def _first_fetches(self) -> None:
        """Writes the copies of the first steps' input: a group of copies for each step, so that each can be
        waited for.
        """
        w, s, spec = self.w, self.s, self.spec
        w.line(self._fetches(spec.under(1, s.rows)))
        w.line("copy_async_commit();")
        if s.ahead > 1:
            with w.block(f"for (int ahead = 1; ahead < {s.ahead}; ++ahead)" if s.ahead > 2 else ""):
                w.line(self._fetches(s.rows * spec.stride[1]))
                w.line("copy_async_commit();")

    def _weights(self, group: str) -> None:
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        w.line()
        w.line(f"{c} weights[{spec.taps[1]}][{spec.taps[2]}][{s.vector}]{' = {}' if spec.groups % s.channels else ''};")
        with w.scope():
            if spec.groups % s.channels:
                w.open(f"if ({group} < {spec.groups})")
            kr, ks, e = self.loop("kr", spec.taps[1]), self.loop("ks", spec.taps[2]), self.loop("e", s.vector)
            terms = [(linear([(group, 1), (e, 1)]), spec.w.strides[0])]
            terms += [(self.reversed_tap(1, kr), spec.w.strides[4]), (self.reversed_tap(2, ks), spec.w.strides[5])]
            w.line(f"weights[{kr}][{ks}][{e}] = {operand_value(spec.w, f'{self.weights}[{linear(terms)}]', c)};")

    def _slide(self, lane: str, tx: str) -> None:
        """Writes the sums: every element of the ring under the patch is read once and used by all outputs it touches.

        Columns of taps come one after another, as in the form that needs no alignment: both add up in the same order.
        """
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        slots = ring_shape(spec, s)[0]
        with w.scope():
            ix, same_column = self._columns()
            iy, same = self.rows(True)
            slot = self.constant("slot", _wrapped(linear([("first", 1), (iy, 1)]), slots), self.small)
            place = linear([(tx, spec.stride[2]), (ix, 1)])
            w.line(f"const auto vec = load_shared<{s.vector}>(&ring[{slot}][{place}][{lane}]);")
            p = self.loop("p", s.rows)
            kr = same or self.tap_row(iy, p)
            q = self.loop("q", s.cols)
            ks = same_column or self.tap_column(ix, q)
            e = self.loop("e", s.vector)
            w.line(f"sum[{p}][{q}][{e}] += weights[{kr}][{ks}][{e}] * {operand_value(spec.x, f'vec[{e}]', c)};")

    def _columns(self) -> tuple[str, str]:
        """Opens the loop over the columns of the ring under a patch; returns (column, column of taps if the patch has
        one).
        """
        spec, s = self.spec, self.s
        if s.cols == 1:
            ks = self.loop("ks", spec.taps[2])
            return linear([(ks, spec.dilation[2])]), ks
        return self.loop("ix", spec.under(2, s.cols)), ""

    def _results(self, group: str, col: str) -> None:
        w, spec, s = self.w, self.spec, self.s
        with w.scope():
            if spec.groups % s.channels:
                w.open(f"if ({group} < {spec.groups})")
            p = self.loop("p", s.rows)
            down = self.constant("row", linear([(self.at["row0"], 1), ("step", s.rows), (p, 1)]))
            if spec.out[1] % s.rows:
                w.line(f"if ({down} >= {spec.out[1]}) break;")
            q = self.loop("q", s.cols)
            across = linear([(col, 1), (q, 1)])
            if spec.out[2] % s.out_cols:
                beyond = f"{across} >= {spec.out[2]}"
                if s.cols > 1:
                    w.line(f"if ({beyond}) break;")
                else:
                    w.open(f"if (!({beyond}))")
            position = [self.at["image"], group, "0", "0", down, across]
            # The channels of a thread all exist: its vector divides their number.
            self.epilogue.results(position, [f"sum[{p}][{q}][{'e' if s.vector > 1 else '0'}]"], Run(s.vector, 1, "e"))


def _wrapped(place: str, slots: int) -> str:
    """Returns the C expression of a place in the ring, given one that is less than a whole ring too far."""
    return f"{place} < {slots} ? {place} : {place} - {slots}"
