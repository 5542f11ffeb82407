"""The slide form of direct convolution: depthwise convolutions whose channels are contiguous, without shared memory.

A thread has a few neighbouring channels of a few neighbouring columns of outputs, and slides down the image.  It loads
the rows of its input a few rows ahead.  What neighbouring threads load as well comes from the L1 cache.
"""

from __future__ import annotations

from math import prod

from codegen.buffers import Edge, every
from codegen.direct_convolution.slide_schedule import SlideSchedule
from codegen.direct_convolution.sliding import Sliding
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.epilogue import Run, one_access
from codegen.iteration import linear


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
        strips = (Edge(spec.out[1], s.rows).tiles, Edge(spec.groups, s.vector * s.lanes).tiles)
        sizes = (spec.images, spec.out[0], *strips, Edge(spec.out[2], s.cols).tiles, s.lanes)
        threads = Edge(prod(sizes), s.threads)
        w.line(f"const {self.t} at = {self.t}(blockIdx.x) * {s.threads} + threadIdx.x;")
        w.leave(threads.outside("at"), how="return")
        scales = (1, 1, s.rows, s.lanes * s.vector, s.cols, s.vector)
        names = "image depth row channel0 col lane"
        image, depth, row, channel0, col, lane = self.places("at", sizes, names, scales)
        group = self.constant("group", linear([(channel0, 1), (lane, 1)]))
        w.leave(Edge(spec.groups, s.vector * s.lanes).outside(group), how="return")
        self.at = {"image": image, "depth": depth, "row0": row, "col0": col, "group": group}
        self._fetch()
        self.load_weights(group)
        fixed = {0: image, 1: group, 3: depth} if self.count == 1 else {0: image, 3: depth}
        self.epilogue.scalars(fixed)
        self.given = self._channel_values(group)
        self.slide(row)
        return threads.tiles

    def _channel_values(self, group: str) -> dict[int, str]:
        """Writes the loads of what the program reads of the thread's channels alone; returns their C names."""
        w, spec = self.w, self.spec
        found: dict[int, str] = {}
        if self.count == 1:
            return found
        along = 1 if spec.filters == 1 else 2
        for n, op in enumerate(spec.program.loads):
            if op.strides[along] and not any(op.strides[4:]):
                name = found[n] = self.names.unique(op.name, "_c")
                place = zip((self.at["image"], group, "0", self.at["depth"]), op.strides)
                start = linear([(self.epilogue.pointers.loads[n], 1), *place])
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
        w.line(f"const {self.t} in_h = {self.origin(1, at['row0'])}, in_w = {self.origin(2, at['col0'])};")
        corner = [(at["image"], xs[0]), (at["group"], xs[1]), ("in_h", steps[1]), ("in_w", steps[2])]
        self.plan_walk()
        w.line(f"const {ctype}* corner = {self.x} + {linear(corner)};")
        box = f"[{spec.taps[0]}][{width}]"
        w.line(f"Packed<{ctype}, {s.vector}> line[{s.ahead}]{box};")
        with (
            w.block(f"const auto fetch = [&](Packed<{ctype}, {s.vector}> (&into){box}, {self.small} iy)", "};"),
            w.scope(),
        ):
            met, own = self.met_row("iy"), self.along(1, "iy")
            exists = every(self.exists(1, f"in_h + {own}"), f"iy < {spec.under(1, s.rows)}", f"({met})" if met else "")
            w.line(f"const bool row_exists = {exists};")
            iz = self.loop("iz", spec.taps[0])
            plane, there = self.source_depth(iz)
            ix = self.loop("ix", width)
            w.leave(self.no_column(ix))
            inside = every("row_exists", there, self.column(ix))
            place = zip((plane, own, self.along(2, ix)), steps)
            w.line(f"into[{iz}][{ix}] = load_if<{s.vector}>({inside}, {linear([('corner', 1), *place])});")
        if self.trimmed:
            w.line("fetch(line[0], begin);")
        else:
            w.unrolled_line(f"for (int iy = 0; iy < {s.ahead}; ++iy) fetch(line[iy], iy);")

    def restart(self) -> None:
        self.w.line("fetch(line[0], 0);")

    def read(self, step: str, iy: str) -> None:
        w, s, spec = self.w, self.s, self.spec
        line = f"line[{step} % {s.ahead}]" if s.ahead > 1 else "line[0]"
        with w.scope():
            iz, ix = self.loop("iz", spec.taps[0]), self.loop("ix", spec.under(2, s.cols))
            w.leave(self.no_column(ix))
            e = self.loop("e", s.vector)
            w.line(f"under[{iz}][{ix}][{e}] = {self.value(f'{line}[{iz}][{ix}][{e}]')};")

    def refill(self, step: str, iy: str) -> None:
        s = self.s
        if self.walk.under > s.ahead:
            line = f"line[{step} % {s.ahead}]" if s.ahead > 1 else "line[0]"
            self.w.line(f"fetch({line}, {linear([(iy, 1)], s.ahead)});")

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
