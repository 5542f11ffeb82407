"""Direct convolution: few channels per group, each input element read once for a tile of outputs.

Five forms, of which one is chosen by what they are estimated to take (`codegen.direct_convolution.cost`):

strips    `codegen.direct_convolution.strips`: unstrided filters over planes whose rows are contiguous; a thread
          keeps the rows under its outputs in registers.
flat      `codegen.direct_convolution.flat`: single channels whose planes lie one behind the other (NCHW); a block has
          whole planes in shared memory.
slide     `codegen.direct_convolution.slide`: single channels that are contiguous (NHWC); a thread slides down.
planes    a block loads the part of the input under its outputs into shared memory, padding included; threads side by
          side take neighbouring columns of one image plane (NCHW, single-channel images, few channels); a thread
          computes a patch of rows x columns for every filter of its group, from rows it reads as vectors;
channels  the same for depthwise convolutions whose channels are contiguous, with more taps than a thread's registers
          hold: threads side by side take neighbouring channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import TypeVar

from codegen.buffers import Edge, every
from codegen.declined import Declined
from codegen.direct_convolution import schedule
from codegen.direct_convolution.flat import Flat
from codegen.direct_convolution.flat_schedule import FlatSchedule, flat_cycles
from codegen.direct_convolution.renderer import Renderer
from codegen.direct_convolution.schedule import (
    PATCH_COLUMNS,
    ChannelsSchedule,
    PlanesSchedule,
    StripsSchedule,
    TiledSchedule,
    blocks_per_sm,
    buffers,
    line_reads,
)
from codegen.direct_convolution.slide import Slide
from codegen.direct_convolution.slide_schedule import SlideSchedule, slide_cycles, widest_access
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.direct_convolution.strips import Strips
from codegen.epilogue import Run
from codegen.family import EstimatedFamily, Form, Schedule
from codegen.iteration import coordinate, linear
from codegen.sizes import values
from codegen.target import Target

#: Most products that a thread's code spells out: loops with more stay loops, so that the code fits the caches.
UNROLLED = 800
ScheduleT = TypeVar("ScheduleT", bound=Schedule)


class _Tiled(Renderer):
    """What the forms with a halo tile in shared memory share."""

    def __init__(self, spec: DirectConvolutionSpec, schedule: TiledSchedule) -> None:
        super().__init__(spec, schedule)
        self.tiled = schedule
        self.buffers = buffers(spec, schedule)

    def blocks_per_sm(self) -> int:
        return blocks_per_sm(self.spec, self.tiled)

    def declare(self) -> None:
        """Declares what lies in shared memory."""
        self.w.line()
        for buffer in self.buffers:
            self.w.line(buffer.static)


class _Planes(_Tiled):
    def __init__(self, spec: DirectConvolutionSpec, schedule: PlanesSchedule) -> None:
        super().__init__(spec, schedule)
        self.s, self.reads = schedule, line_reads(spec, schedule)
        self.planes = Edge(spec.images * spec.groups, schedule.planes)

    def describe(self) -> str:
        s = self.s
        planes = f"{s.planes} planes of " if s.planes > 1 else ""
        return f"a block {planes}{s.out_rows} x {s.out_cols} outputs, a thread {s.rows} x {s.cols}"

    def body(self) -> int:
        w, s, spec = self.w, self.s, self.spec
        one = {"image": Edge(spec.images, 1), "group": Edge(spec.groups, 1)}
        planes = {"plane0": self.planes} if s.planes > 1 else one
        blocks = self.locate(s.out_rows, s.out_cols, **planes)
        w.line("const int t = threadIdx.x;")
        tz, ty, tx = self.places("t", (s.planes, s.down, s.lanes), "tz ty tx", itype=self.small)
        self.declare()
        self._fill_weights()
        self._fill_tile()
        w.line("__syncthreads();")
        w.line()
        plane, image, group = self._plane(tz)
        row = self.constant("row", linear([(self.at["row0"], 1), (ty, s.rows)]))
        col = self.constant("col", linear([(self.at["col0"], 1), (tx, s.cols)]))
        edges = self.edges
        w.leave(self.planes.outside(plane), edges["row0"].outside(row), edges["col0"].outside(col), how="return")
        w.line(f"{spec.accumulate} sum[{spec.filters}][{s.rows}][{s.cols}] = {{}};")
        self._slide(self._of(tz), ty, tx)
        w.line()
        self.epilogue.scalars()
        with w.scope():
            f, p = self.loop("f", spec.filters), self.loop("p", s.rows)
            position = [image, group, f, self.at["depth"], self.patch_row(row, p), col]
            sums = [f"sum[{f}][{p}][{'q' if s.cols > 1 else '0'}]"]
            self.epilogue.results(position, sums, self.columns(col, s.cols))
        return blocks

    def _of(self, z: str) -> str:
        """Returns the subscript of the arrays for a block's z-th plane."""
        return f"[{z}]" if self.s.planes > 1 else ""

    def _plane(self, z: str) -> tuple[str, str, str]:
        """Writes which plane the block's z-th one is; returns its number, its image and its group."""
        if self.s.planes == 1:
            return "0", self.at["image"], self.at["group"]
        plane = self.constant("plane", linear([(self.at["plane0"], 1), (z, 1)]))
        image, group = self.places(plane, (self.spec.images, self.spec.groups), "image group")
        return plane, image, group

    def _fill_weights(self) -> None:
        w, spec, s = self.w, self.spec, self.s
        sizes = (s.planes, spec.filters, spec.in_channels, *spec.taps)
        with w.block(f"for ({self.small} at = t; at < {prod(sizes)}; at += {self.threads})"):
            z, f, ic, *taps = ("0" if size == 1 else f"({coordinate('at', sizes, d)})" for d, size in enumerate(sizes))
            group = self.at.get("group", "0")
            if s.planes > 1 and spec.groups > 1:
                # A block's last planes may not exist: other groups' weights are staged for them, and not used.
                group = f"(({linear([(self.at['plane0'], 1), (z, 1)])}) % {spec.groups})"
            first = "[0]" * len(self.buffers["weights"].dims)
            w.line(f"(&weights{first})[at] = {self.weight(group, f, ic, taps)};")

    def _fill_tile(self) -> None:
        """Writes how a block fills the halo tile: runs of lanes take its rows in turn; outside the image is zero."""
        w, spec, s, t = self.w, self.spec, self.s, self.t
        # With interleaved channels, a row of the tile is all channels of a row of the image.
        interleaved = spec.in_channels > 1 and spec.x.strides[2] == 1
        depth, rows, cols = schedule.tile_sizes(spec, s)
        sizes = (s.planes, 1 if interleaved else spec.in_channels, depth, rows)
        width = cols * (spec.in_channels if interleaved else 1)
        lanes = schedule.fill_lanes(width, s.threads)
        if width <= lanes:
            w.line("#pragma unroll 4")
        with w.block(f"for ({self.small} line = t / {lanes}; line < {prod(sizes)}; line += {self.threads // lanes})"):
            z, ic, iz, iy = self.places("line", sizes, "z ic iz iy", itype=self.small)
            plane, image, group = self._plane(z)
            in_d, exists = self.source_depth(iz)
            w.line(f"const {t} in_h = {self.source(1, self.at['row0'], iy)};")
            w.line(f"const bool inside = {every(self.planes.inside(plane), exists, self.exists(1, 'in_h'))};")
            if width > lanes:
                w.line("#pragma unroll 4")
            at = "at" if interleaved else "ix"
            along = f"{at} = 0; ix < {width}; ++ix"
            if lanes > 1 or interleaved:
                along = f"{at} = t % {lanes}; {at} < {width}; {at} += {lanes}"
            with w.block(f"for (int {along})"):
                if interleaved:
                    ic = "ic"
                    w.line(f"const {self.small} ic = at % {spec.in_channels}, ix = at / {spec.in_channels};")
                w.line(f"const {t} in_w = {self.source(2, self.at['col0'], 'ix')};")
                terms = list(zip((image, group, ic, in_d, "in_h", "in_w"), spec.x.strides))
                value = f"{self.value(f'{self.x}[{linear(terms)}]')} : {spec.accumulate}(0)"
                to = f"tile{self._of(z)}[{ic}][{iz}][{iy}][ix]"
                w.line(f"{to} = inside && {self.exists(2, 'in_w')} ? {value};")

    def _slide(self, plane: str, ty: str, tx: str) -> None:
        """Writes the sums: every row of the tile under the patch is read once and used by all outputs it touches."""
        w, spec, s, reads = self.w, self.spec, self.s, self.reads
        sh, sw, dw = spec.stride[1], spec.stride[2], spec.dilation[2]
        with w.scope():
            products = spec.filters * s.rows * s.cols * spec.taps[2]
            short = products <= UNROLLED
            unrolled = [products * prod(spec.taps[d] for d in range(first, 2)) for first in (1, 0)]
            whole = unrolled[1] * spec.in_channels <= UNROLLED
            ic = self.loop("ic", spec.in_channels, whole)
            iz = self.loop("iz", spec.taps[0], unrolled[1] <= UNROLLED)
            iy, kr = self.under(1, s.rows, unrolled[0] <= UNROLLED)
            start = f"tile{plane}[{ic}][{iz}][{linear([(ty, s.rows * sh), (iy, 1)])}]"
            first = linear([(tx, s.cols * sw), ("ix", 1)])
            if reads is not None:
                w.line(f"{spec.accumulate} under[{reads}];  // the part of the row under this thread's patch")
                if s.cols * sw % PATCH_COLUMNS == 0:
                    with w.unrolled(f"for (int ix = 0; ix < {reads}; ix += {PATCH_COLUMNS})"):
                        w.line(f"const auto vec = load_shared<{PATCH_COLUMNS}>(&{start}[{first}]);")
                        w.unrolled_line(f"for (int e = 0; e < {PATCH_COLUMNS}; ++e) under[ix + e] = vec[e];")
                else:
                    w.unrolled_line(f"for (int ix = 0; ix < {reads}; ++ix) under[ix] = {start}[{first}];")
            p = self.loop("p", s.rows)
            kr = kr or self.tap(1, iy, p)
            f = self.loop("f", spec.filters)
            ks = self.loop("ks", spec.taps[2], reads is not None or short)
            q = self.loop("q", s.cols)
            value = f"under[{linear([(q, sw), (ks, dw)])}]"
            if reads is None:
                value = f"{start}[{linear([(tx, s.cols * sw), (q, sw), (ks, dw)])}]"
            w.line(f"sum[{f}][{p}][{q}] += weights{plane}[{f}][{ic}][{iz}][{kr}][{ks}] * {value};")


class _Channels(_Tiled):
    def __init__(self, spec: DirectConvolutionSpec, schedule: ChannelsSchedule) -> None:
        super().__init__(spec, schedule)
        self.s = schedule

    def describe(self) -> str:
        s = self.s
        return f"a block {s.rows} x {s.columns} outputs of {s.channels} channels, a thread {s.rows} x 1 of {s.vector}"

    def body(self) -> int:
        w, s, spec = self.w, self.s, self.spec
        blocks = self.locate_channels(s.rows, s.columns, s.channels)
        self.declare()
        self._fill_tile()
        w.line("__syncthreads();")
        w.line()
        lane, tx, group, col = self.channel(s.lanes, s.columns, s.vector)
        w.leave(self.edges["channel0"].outside(group), self.edges["col0"].outside(col), how="return")
        w.line(f"{spec.accumulate} sum[{s.rows}][{s.vector}] = {{}};")
        self._slide(group, lane, tx)
        w.line()
        self.epilogue.scalars()
        with w.scope():
            p = self.loop("p", s.rows)
            position = [self.at["image"], group, "0", self.at["depth"], self.patch_row(self.at["row0"], p), col]
            # The channels of a thread all exist: its vector divides their number.
            self.epilogue.results(position, [f"sum[{p}][{'e' if s.vector > 1 else '0'}]"], Run(s.vector, 1, "e"))
        return blocks

    def _fill_tile(self) -> None:
        """Writes how a block fills the halo tile: runs of channels as they are stored, up to 16 bytes at a time."""
        w, spec, s = self.w, self.spec, self.s
        vector = widest_access(spec, (16, 8, 4, 2), s.channels) or 1
        *box, channels = self.buffers["tile"].dims
        sizes = (*box, channels // vector)
        w.line("#pragma unroll 4")
        with w.block(f"for ({self.small} at = threadIdx.x; at < {prod(sizes)}; at += {s.threads})"):
            iz, iy, ix, strip = self.places("at", sizes, "iz iy ix strip", (1, 1, 1, vector), self.small)
            in_d, exists = self.source_depth(iz)
            in_h, in_w = self.source(1, self.at["row0"], iy), self.source(2, self.at["col0"], ix)
            w.line(f"const {self.t} in_h = {in_h}, in_w = {in_w};")
            channel = linear([(self.at["channel0"], 1), (strip, 1)])
            inside = every(
                exists, self.exists(1, "in_h"), self.exists(2, "in_w"), self.edges["channel0"].inside(channel)
            )
            image, _, _, *along = spec.x.strides
            terms = [(self.at["image"], image), (self.at["channel0"], 1), (strip, 1)]
            terms += zip((in_d, "in_h", "in_w"), along)
            w.line(f"Vector<{spec.x.dtype.ctype}, {vector}> value = {{}};")
            w.line(f"if ({inside}) value = load<{vector}>({self.x} + {linear(terms)});")
            w.line(f"store_shared(&tile[{iz}][{iy}][{ix}][{strip}], value);")

    def _slide(self, group: str, lane: str, tx: str) -> None:
        """Writes the sums, a column of taps after another: a row of the tile is read once for all its outputs."""
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        with w.scope():
            products = (s.rows + 1) * s.vector * spec.taps[1]  # and the loads of their weights
            iz = self.loop("iz", spec.taps[0], products * spec.taps[2] * spec.taps[0] <= UNROLLED)
            ks = self.loop("ks", spec.taps[2], products * spec.taps[2] <= UNROLLED)
            w.line(f"{c} column[{spec.taps[1]}][{s.vector}];")
            with w.scope():
                kr = self.loop("kr", spec.taps[1])
                e = self.loop("e", s.vector)
                channel = linear([(group, 1), (e, 1)])
                w.line(f"column[{kr}][{e}] = {self.weight(channel, '0', '0', (iz, kr, ks))};")
            iy, same = self.under(1, s.rows)
            place = linear([(tx, spec.stride[2]), (ks, spec.dilation[2])])
            w.line(f"const auto vec = load_shared<{s.vector}>(&tile[{iz}][{iy}][{place}][{lane}]);")
            p = self.loop("p", s.rows)
            kr = same or self.tap(1, iy, p)
            e = self.loop("e", s.vector)
            w.line(f"sum[{p}][{e}] += column[{kr}][{e}] * {self.value(f'vec[{e}]')};")


def _form(
    name: str,
    schedule: type[ScheduleT],
    schedules: Callable[[DirectConvolutionSpec, Target], Sequence[ScheduleT]],
    renderer: Callable[[DirectConvolutionSpec, ScheduleT], Renderer],
    cost: Callable[[DirectConvolutionSpec, ScheduleT, Target], float],
) -> Form[DirectConvolutionSpec, ScheduleT]:
    """Returns a form, which takes what its first schedule is estimated to take."""

    @lru_cache(256)
    def ranked(spec: DirectConvolutionSpec, target: Target) -> Sequence[ScheduleT]:
        return tuple(schedules(spec, target))

    def found(spec: DirectConvolutionSpec, target: Target) -> Sequence[ScheduleT]:
        # Sizes that vary are equal whatever their values are.
        return ranked(spec, target) if values(spec) is spec else schedules(spec, target)

    def cycles(spec: DirectConvolutionSpec, target: Target) -> float:
        for first in found(spec, target):
            return cost(spec, first, target)
        raise Declined(f"no schedule of {name} is meant for {spec.name}")

    return Form(name, schedule, found, lambda spec, s: renderer(spec, s).render(), cycles, cost=cost)


FAMILY = EstimatedFamily(
    "direct_convolution",
    DirectConvolutionSpec,
    (
        _form("strips", StripsSchedule, schedule.strips, Strips, schedule.strip_cycles),
        _form("flat", FlatSchedule, schedule.flats, Flat, flat_cycles),
        _form("slide", SlideSchedule, schedule.slides, Slide, slide_cycles),
        _form("planes", PlanesSchedule, schedule.planes, _Planes, schedule.tiled_cycles),
        _form("channels", ChannelsSchedule, schedule.channels, _Channels, schedule.tiled_cycles),
    ),
    last_competes=lambda spec: True,
)
