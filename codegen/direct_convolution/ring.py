"""The ring form of direct convolution: depthwise convolutions whose channels are contiguous, at the speed of memory.

A block walks down the image.  Rows of the input lie in a ring in shared memory; while a few rows of outputs are
computed from the ring, the input rows of the next ones are copied to it (cp.async), so that enough bytes are in flight
without taking registers.  A block as wide and as high as the image reads every input element exactly once.  Threads
side by side take neighbouring channels; a thread computes a patch of rows x columns of its channels with its weights in
registers.
"""

from __future__ import annotations

from math import prod

from codegen.buffers import Buffers, Edge, every
from codegen.direct_convolution.renderer import Renderer
from codegen.direct_convolution.ring_schedule import RingSchedule, ring_buffer, ring_registers
from codegen.direct_convolution.schedule import SM_REGISTERS
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.epilogue import Run
from codegen.iteration import linear


class Ring(Renderer):
    def __init__(self, spec: DirectConvolutionSpec, schedule: RingSchedule) -> None:
        super().__init__(spec, schedule)
        self.s, self.ring = schedule, ring_buffer(spec, schedule)
        self.w.buffers = Buffers((self.ring,))

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
        w, s, spec = self.w, self.s, self.spec
        blocks = self.locate_channels(s.block_rows, s.out_cols, s.channels)
        lane, tx, group, col = self.channel(s.lanes, s.across, s.vector, s.cols)
        self._declare_ring()
        self._fetch()
        self._first_fetches()
        self._weights(group)
        w.line()
        self.epilogue.scalars()
        steps = self._steps()
        w.line(f"{self.small} first = 0;  // where in the ring the rows under the outputs begin")
        w.line("#pragma unroll 1")
        with w.block(f"for ({self.t} step = 0; step < {steps}; ++step)"):
            w.line(f"copy_async_wait<{s.ahead - 1}>();")
            w.line("__syncthreads();  // the rows are there for all, and all are done with those before")
            w.line(f"if (step + {s.ahead} < {steps}) {self._fetches(self.advance)}")
            w.line("copy_async_commit();")
            w.line(f"{spec.accumulate} sum[{s.rows}][{s.cols}][{s.vector}] = {{}};")
            self._slide(lane, tx)
            self._results(group, col)
            w.line(f"first = {self._wrapped(f'first + {self.advance}')};")
        return blocks

    @property
    def advance(self) -> int:
        """Rows of the input from one step to the next."""
        return self.s.rows * self.spec.stride[1]

    def _steps(self) -> str:
        """Writes how many steps the block has; returns the C expression."""
        s, row0, rows = self.s, self.at["row0"], self.spec.out[1]
        if not self.edges["row0"].ragged:
            return str(s.steps)
        rest = f"({rows + s.rows - 1} - {row0}) / {s.rows}" if row0 != "0" else str(Edge(rows, s.rows).tiles)
        whole = linear([(row0, 1)], s.block_rows)
        self.w.line(f"const {self.t} steps = {whole} <= {rows} ? {s.steps} : {rest};")
        return "steps"

    def _declare_ring(self) -> None:
        w, ring = self.w, self.ring
        box = "".join(f"[{size}]" for size in ring.dims)
        w.line()
        w.line("FUSEGRAPH_DYNAMIC_SHARED(shared);")
        w.line(f"auto& ring = *reinterpret_cast<{ring.ctype}(*){box}>(shared);  // {ring.note}")
        w.line(f"{self.small} put = 0;  // where in the ring the next row goes")
        w.line(f"{self.t} in_h = {self.source(1, self.at['row0'], '0')};")

    def _fetch(self) -> None:
        """Writes a function that starts the copy of the next input row; what lies outside the image becomes zero."""
        w, spec, s = self.w, self.spec, self.s
        columns, channels = self.ring.shape
        ctype, width, lanes = self.ring.ctype, s.copy * spec.x.dtype.itemsize, channels // s.copy
        image = spec.x.strides[0]
        # The stride of a dimension of one element means nothing: it need not keep addresses aligned.
        along, across = (stride if many > 1 else 0 for stride, many in zip(spec.x.strides[4:], spec.sizes[1:]))
        with w.block("const auto fetch = [&]", "};"):
            w.line(f"const bool inside = {self.exists(1, 'in_h')};")
            own = linear([(f"threadIdx.x % {lanes}", s.copy)]) if lanes > 1 else "0"
            strip = self.constant("strip", own, self.small)
            channel = linear([(self.at["channel0"], 1), (strip, 1)])
            exists = every("inside", self.edges["channel0"].inside(channel), self.exists(2, "in_w"))
            terms = [(self.at["image"], image), ("in_h", along), (self.at["channel0"], 1), (strip, 1)]
            w.line(f"const {ctype}* row = {self.x} + {linear(terms)};")
            start = f"threadIdx.x / {lanes}" if lanes > 1 else "threadIdx.x"
            with w.unrolled(f"for ({self.small} ix = {start}; ix < {columns}; ix += {s.threads // lanes})"):
                w.line(f"const {self.t} in_w = {self.source(2, self.at['col0'], 'ix')};")
                source = f"row + {linear([('in_w', across)])}" if across else "row"
                w.line(f"copy_async<{width}>(&ring[put][ix][{strip}], {source}, {exists} ? {width} : 0);")
            w.line(f"put = {self._wrapped('put + 1')};")
            w.line("++in_h;")

    def _wrapped(self, place: str) -> str:
        """Returns the C expression of a place in the ring, given one that is less than a whole ring too far."""
        slots = self.ring.stages
        return f"{place} < {slots} ? {place} : {place} - {slots}"

    def _fetches(self, count: int) -> str:
        return "fetch();" if count == 1 else f"for (int k = 0; k < {count}; ++k) fetch();"

    def _first_fetches(self) -> None:
        """Writes the copies of the first steps' input: a group for each step, so that each can be waited for."""
        w, s, spec = self.w, self.s, self.spec
        w.line(self._fetches(spec.under(1, s.rows)))
        w.line("copy_async_commit();")
        if s.ahead > 1:
            with w.block(f"for (int ahead = 1; ahead < {s.ahead}; ++ahead)" if s.ahead > 2 else ""):
                w.line(self._fetches(self.advance))
                w.line("copy_async_commit();")

    def _weights(self, group: str) -> None:
        w, spec, s, inside = self.w, self.spec, self.s, self.edges["channel0"].inside(group)
        dims = f"[{spec.taps[1]}][{spec.taps[2]}][{s.vector}]"
        w.line()
        w.line(f"{spec.accumulate} weights{dims}{' = {}' if inside else ''};")
        with w.guarded(inside), w.scope():
            kr, ks, e = self.loop("kr", spec.taps[1]), self.loop("ks", spec.taps[2]), self.loop("e", s.vector)
            channel = linear([(group, 1), (e, 1)])
            w.line(f"weights[{kr}][{ks}][{e}] = {self.weight(channel, '0', '0', ('0', kr, ks))};")

    def _slide(self, lane: str, tx: str) -> None:
        """Writes the sums: every element of the ring under the patch is read once and used by all outputs it touches.

        Columns of taps come one after another, as in the form that needs no alignment: both add up in the same order.
        """
        w, spec, s = self.w, self.spec, self.s
        with w.scope():
            ix, same_column = self.under(2, s.cols)
            iy, same = self.under(1, s.rows)
            slot = self.constant("slot", self._wrapped(linear([("first", 1), (iy, 1)])), self.small)
            place = linear([(tx, spec.stride[2]), (ix, 1)])
            w.line(f"const auto vec = load_shared<{s.vector}>(&ring[{slot}][{place}][{lane}]);")
            p = self.loop("p", s.rows)
            kr = same or self.tap(1, iy, p)
            q = self.loop("q", s.cols)
            ks = same_column or self.tap(2, ix, q)
            e = self.loop("e", s.vector)
            w.line(f"sum[{p}][{q}][{e}] += weights[{kr}][{ks}][{e}] * {self.value(f'vec[{e}]')};")

    def _results(self, group: str, col: str) -> None:
        w, spec, s = self.w, self.spec, self.s
        inside, columns = self.edges["channel0"].inside(group), self.edges["col0"]
        with w.guarded(inside), w.scope():
            p = self.loop("p", s.rows)
            down = self.constant("row", linear([(self.at["row0"], 1), ("step", s.rows), (p, 1)]))
            w.leave(Edge(spec.out[1], s.rows).outside(down), how="break")
            q = self.loop("q", s.cols)
            across = linear([(col, 1), (q, 1)])
            beyond = columns.outside(across)
            if s.cols > 1:
                w.leave(beyond, how="break")
            position = [self.at["image"], group, "0", "0", down, across]
            with w.block(f"if (!({beyond}))", when=bool(beyond) and s.cols == 1):
                # The channels of a thread all exist: its vector divides their number.
                sums = [f"sum[{p}][{q}][{'e' if s.vector > 1 else '0'}]"]
                self.epilogue.results(position, sums, Run(s.vector, 1, "e"))
