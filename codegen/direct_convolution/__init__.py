"""Direct convolution: few channels per group, each input element read once for a tile of outputs.

Four forms:

strips    `codegen.direct_convolution.strips`: unstrided filters over planes whose rows are contiguous; a thread
          keeps the rows under its outputs in registers.
ring      `codegen.direct_convolution.ring`: depthwise convolutions whose channels are contiguous (NHWC); a block
          walks down the image with the input rows in a ring in shared memory.
planes    a block loads the part of the input under its outputs into shared memory, padding included; threads side by
          side take neighbouring columns of one image plane (NCHW, single-channel images, few channels); a thread
          computes a patch of rows x columns for every filter of its group, from rows it reads as vectors;
channels  the same for depthwise convolutions whose channels are contiguous, where there can be no ring: threads side
          by side take neighbouring channels.
"""

from __future__ import annotations

from math import prod

from codegen.direct_convolution import schedule
from codegen.direct_convolution.renderer import Renderer
from codegen.direct_convolution.ring import Ring
from codegen.direct_convolution.ring_schedule import RingSchedule, widest_access
from codegen.direct_convolution.schedule import (
    PATCH_COLUMNS,
    ChannelsSchedule,
    PlanesSchedule,
    StripsSchedule,
    blocks_per_sm,
    line_reads,
    pitch,
    tile_sizes,
)
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.direct_convolution.strips import Strips
from codegen.epilogue import Run, operand_value
from codegen.family import Family, Form
from codegen.iteration import coordinate, linear, unsigned

#: Most products that a thread's code spells out: loops with more stay loops, so that the code fits the caches.
UNROLLED = 800


class _Planes(Renderer):
    def __init__(self, spec: DirectConvolutionSpec, schedule: PlanesSchedule) -> None:
        super().__init__(spec, schedule)
        self.s = schedule
        self.depth, self.tile_rows, self.tile_cols = tile_sizes(spec, schedule)
        self.pitch, self.reads = pitch(spec, schedule), line_reads(spec, schedule)

    def blocks_per_sm(self) -> int:
        return blocks_per_sm(self.spec, self.s)

    def describe(self) -> str:
        s = self.s
        planes = f"{s.planes} planes of " if s.planes > 1 else ""
        return f"a block {planes}{s.out_rows} x {s.out_cols} outputs, a thread {s.rows} x {s.cols}"

    def body(self) -> int:
        w, s, spec, c = self.w, self.s, self.spec, self.spec.accumulate
        many = spec.images * spec.groups
        blocks = self.locate(
            [
                *(
                    [("plane0", -(-many // s.planes), s.planes)]
                    if s.planes > 1
                    else [("image", spec.images, 1), ("group", spec.groups, 1)]
                ),
                ("depth", spec.out[0], 1),
                ("row0", -(-spec.out[1] // s.out_rows), s.out_rows),
                ("col0", -(-spec.out[2] // s.out_cols), s.out_cols),
            ]
        )
        w.line("const int t = threadIdx.x;")
        shape = (s.planes, s.down, s.lanes)
        tz, ty, tx = (
            self.constant(name, coordinate("t", shape, d), self.small) if shape[d] > 1 else "0"
            for d, name in enumerate(("tz", "ty", "tx"))
        )
        w.line()
        box = (spec.in_channels, self.depth, self.tile_rows, self.pitch)
        self.planes = f"[{s.planes}]" if s.planes > 1 else ""
        taps = (spec.filters, spec.in_channels, *spec.taps)
        w.line(f"__shared__ __align__(16) {c} tile{self.planes}{_subscripts(box)};")
        w.line(f"__shared__ {c} weights{self.planes}{_subscripts(taps)};")
        self._stage_weights()
        self._stage_tile()
        w.line("__syncthreads();")
        w.line()
        plane, image, group = "", self.at.get("image", "0"), self.at.get("group", "0")
        if s.planes > 1:
            plane = f"[{tz}]"
            where = self.constant("plane", linear([(self.at["plane0"], 1), (tz, 1)]))
            image, group = self._plane_of(where)
        row = self.constant("row", linear([(self.at["row0"], 1), (ty, s.rows)]))
        col = self.constant("col", linear([(self.at["col0"], 1), (tx, s.cols)]))
        beyond = [f"{where} >= {many}"] if s.planes > 1 and many % s.planes else []
        beyond += [f"{row} >= {spec.out[1]}"] if spec.out[1] % s.out_rows and row != "0" else []
        beyond += [f"{col} >= {spec.out[2]}"] if spec.out[2] % s.out_cols and col != "0" else []
        if beyond:
            w.line(f"if ({' || '.join(beyond)}) return;")
        w.line(f"{c} sum[{spec.filters}][{s.rows}][{s.cols}] = {{}};")
        self._slide(plane, ty, tx)
        w.line()
        self.epilogue.scalars()
        with w.scope():
            f, p = self.loop("f", spec.filters), self.loop("p", s.rows)
            down = linear([(row, 1), (p, 1)])
            if spec.out[1] % s.rows:
                w.line(f"if ({down} >= {spec.out[1]}) break;")
            position = [image, group, f, self.at["depth"], down, col]
            whole = spec.out[2] % s.cols == 0
            run = Run(s.cols, 5, "q", None if whole else lambda q: f"{linear([(col, 1), (q, 1)])} >= {spec.out[2]}")
            self.epilogue.results(position, [f"sum[{f}][{p}][{'q' if s.cols > 1 else '0'}]"], run)
        return blocks

    def _plane_of(self, plane: str) -> tuple[str, str]:
        """Writes the image and the group of a plane; returns their C variables."""
        shape = (self.spec.images, self.spec.groups)
        image, group = (
            self.constant(name, coordinate(plane, shape, d)) if shape[d] > 1 else "0"
            for d, name in enumerate(("image", "group"))
        )
        return image, group

    def _stage_weights(self) -> None:
        w, spec, s = self.w, self.spec, self.s
        sizes = (s.planes, spec.filters, spec.in_channels, *spec.taps)
        count = prod(sizes)
        with w.block(f"for ({self.small} at = t; at < {count}; at += {self.threads})"):
            plane, *names = ("0" if size == 1 else f"({coordinate('at', sizes, d)})" for d, size in enumerate(sizes))
            group = self.at.get("group", "0")
            if s.planes > 1:
                # A block's last planes may not exist: other groups' weights are staged for them, and not used.
                where = linear([(self.at["plane0"], 1), (plane, 1)])
                group = f"(({where}) % {spec.groups})" if spec.groups > 1 else "0"
            names = names[:2] + [self.reversed_tap(a, n) if n != "0" else n for a, n in enumerate(names[2:])]
            terms = [(group, spec.w.strides[0]), *zip(names, spec.w.strides[1:])]
            first = "[0]" * (5 + (s.planes > 1))
            source = operand_value(spec.w, f"{self.weights}[{linear(terms)}]", spec.accumulate)
            w.line(f"(&weights{first})[at] = {source};")

    def _stage_tile(self) -> None:
        """Writes how a block stages the halo tile: runs of lanes take its rows in turn; outside the image is zero."""
        w, spec, s, t = self.w, self.spec, self.s, self.t
        # With interleaved channels, a row of the tile is all channels of a row of the image.
        interleaved = spec.in_channels > 1 and spec.x.strides[2] == 1
        sizes = (s.planes, 1 if interleaved else spec.in_channels, self.depth, self.tile_rows)
        width = self.tile_cols * (spec.in_channels if interleaved else 1)
        lanes = 32
        while lanes > 1 and (lanes // 2 >= width or self.threads % lanes):
            lanes //= 2
        several = width > lanes
        if not several:
            w.line("#pragma unroll 4")
        with w.block(f"for ({self.small} line = t / {lanes}; line < {prod(sizes)}; line += {self.threads // lanes})"):
            z, ic, iz, iy = (
                self.constant(name, coordinate("line", sizes, d), self.small) if sizes[d] > 1 else "0"
                for d, name in enumerate(("z", "ic", "iz", "iy"))
            )
            image, group = self.at.get("image", "0"), self.at.get("group", "0")
            inside = []
            if s.planes > 1:
                where = self.constant("plane", linear([(self.at["plane0"], 1), (z, 1)]))
                image, group = self._plane_of(where)
                if spec.images * spec.groups % s.planes:
                    inside.append(f"{where} < {spec.images * spec.groups}")
            in_d, exists = self.source_depth(iz)
            w.line(f"const {t} in_h = {self.source(1, self.at['row0'], iy)};")
            inside += [*exists, f"{unsigned(t)}(in_h) < {spec.sizes[1]}"]
            w.line(f"const bool inside = {' && '.join(inside)};")
            ix = "ix"
            if several:
                w.line("#pragma unroll 4")
            if interleaved:
                w.open(f"for (int at = t % {lanes}; at < {width}; at += {lanes})")
                w.line(f"const {self.small} ic = at % {spec.in_channels}, ix = at / {spec.in_channels};")
                ic = "ic"
            elif lanes > 1:
                w.open(f"for (int ix = t % {lanes}; ix < {width}; ix += {lanes})")
            else:
                w.open(f"for (int ix = 0; ix < {width}; ++ix)")
            w.line(f"const {t} in_w = {self.source(2, self.at['col0'], ix)};")
            terms = list(zip((image, group, ic, in_d, "in_h", "in_w"), spec.x.strides))
            value = operand_value(spec.x, f"{self.x}[{linear(terms)}]", spec.accumulate)
            plane = f"[{z}]" if s.planes > 1 else ""
            inside_row = f"inside && {unsigned(t)}(in_w) < {spec.sizes[2]}"
            w.line(f"tile{plane}[{ic}][{iz}][{iy}][{ix}] = {inside_row} ? {value} : {spec.accumulate}(0);")
        w.close()

    def _slide(self, plane: str, ty: str, tx: str) -> None:
        """Writes the sums: every row of the tile under the patch is read once and used by all outputs it touches."""
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        sh, sw, dw = spec.stride[1], spec.stride[2], spec.dilation[2]
        with w.scope():
            products = spec.filters * s.rows * s.cols * spec.taps[2]
            short = products <= UNROLLED
            unrolled = [products * prod(spec.taps[d] for d in range(first, 2)) for first in (1, 0)]
            whole = unrolled[1] * spec.in_channels <= UNROLLED
            ic = self.loop("ic", spec.in_channels, whole)
            iz = self.loop("iz", spec.taps[0], unrolled[1] <= UNROLLED)
            iy, kr = self.rows(unrolled[0] <= UNROLLED)
            start = f"tile{plane}[{ic}][{iz}][{linear([(ty, s.rows * sh), (iy, 1)])}]"
            first = linear([(tx, s.cols * sw), ("ix", 1)])
            reads = self.reads
            if reads is not None:
                w.line(f"{c} under[{reads}];  // the part of the row under this thread's patch")
                w.line("#pragma unroll")
                if s.cols * sw % PATCH_COLUMNS == 0:
                    with w.block(f"for (int ix = 0; ix < {reads}; ix += {PATCH_COLUMNS})"):
                        w.line(f"const auto vec = load_shared<{PATCH_COLUMNS}>(&{start}[{first}]);")
                        w.unrolled_line(f"for (int e = 0; e < {PATCH_COLUMNS}; ++e) under[ix + e] = vec[e];")
                else:
                    w.line(f"for (int ix = 0; ix < {reads}; ++ix) under[ix] = {start}[{first}];")
            p = self.loop("p", s.rows)
            kr = kr or self.tap_row(iy, p)
            f = self.loop("f", spec.filters)
            ks = self.loop("ks", spec.taps[2], reads is not None or short)
            q = self.loop("q", s.cols)
            if reads is not None:
                value = f"under[{linear([(q, sw), (ks, dw)])}]"
            else:
                value = f"{start}[{linear([(tx, s.cols * sw), (q, sw), (ks, dw)])}]"
            w.line(f"sum[{f}][{p}][{q}] += weights{plane}[{f}][{ic}][{iz}][{kr}][{ks}] * {value};")


class _Channels(Renderer):
    def __init__(self, spec: DirectConvolutionSpec, schedule: ChannelsSchedule) -> None:
        super().__init__(spec, schedule)
        self.s = schedule
        self.depth, self.tile_rows, self.tile_cols = tile_sizes(spec, schedule)

    def blocks_per_sm(self) -> int:
        return blocks_per_sm(self.spec, self.s)

    def describe(self) -> str:
        s = self.s
        return f"a block {s.rows} x {s.columns} outputs of {s.channels} channels, a thread {s.rows} x 1 of {s.vector}"

    def body(self) -> int:
        w, s, spec, c = self.w, self.s, self.spec, self.spec.accumulate
        blocks = self.locate(
            [
                ("image", spec.images, 1),
                ("channel0", -(-spec.groups // s.channels), s.channels),
                ("depth", spec.out[0], 1),
                ("row0", -(-spec.out[1] // s.rows), s.rows),
                ("col0", -(-spec.out[2] // s.columns), s.columns),
            ]
        )
        w.line()
        box = (self.depth, self.tile_rows, self.tile_cols, s.channels)
        w.line(f"__shared__ __align__(16) {spec.x.dtype.ctype} tile{_subscripts(box)};")
        self._stage_tile()
        w.line("__syncthreads();")
        w.line()
        shape = (s.columns, s.lanes)
        places = [coordinate("threadIdx.x", shape, d) if shape[d] > 1 else "0" for d in (1, 0)]
        lane = self.constant("lane", linear([(places[0], s.vector)]), self.small)
        tx = self.constant("tx", places[1], self.small)
        group = self.constant("group", linear([(self.at["channel0"], 1), (lane, 1)]))
        col = self.constant("col", linear([(self.at["col0"], 1), (tx, 1)]))
        beyond = [f"{group} >= {spec.groups}"] if spec.groups % s.channels else []
        beyond += [f"{col} >= {spec.out[2]}"] if spec.out[2] % s.columns else []
        if beyond:
            w.line(f"if ({' || '.join(beyond)}) return;")
        w.line(f"{c} sum[{s.rows}][{s.vector}] = {{}};")
        self._slide(group, lane, tx)
        w.line()
        self.epilogue.scalars()
        with w.scope():
            p = self.loop("p", s.rows)
            down = linear([(self.at["row0"], 1), (p, 1)])
            if spec.out[1] % s.rows:
                w.line(f"if ({down} >= {spec.out[1]}) break;")
            position = [self.at["image"], group, "0", self.at["depth"], down, col]
            # The channels of a thread all exist: its vector divides their number.
            self.epilogue.results(position, [f"sum[{p}][{'e' if s.vector > 1 else '0'}]"], Run(s.vector, 1, "e"))
        return blocks

    def _stage_tile(self) -> None:
        """Writes how a block stages the halo tile: runs of channels as they are stored, 16 bytes at a time where
        aligned.
        """
        w, spec, s, t = self.w, self.spec, self.s, self.t
        vector = widest_access(spec, (16, 8, 4, 2), s.channels) or 1
        sizes = (self.depth, self.tile_rows, self.tile_cols, s.channels // vector)
        w.line("#pragma unroll 4")
        with w.block(f"for ({self.small} at = threadIdx.x; at < {prod(sizes)}; at += {s.threads})"):
            iz, iy, ix, strip = (
                self.constant(name, linear([(coordinate("at", sizes, d), vector if d == 3 else 1)]), self.small)
                if sizes[d] > 1
                else "0"
                for d, name in enumerate(("iz", "iy", "ix", "strip"))
            )
            in_d, bounds = self.source_depth(iz)
            in_h, in_w = self.source(1, self.at["row0"], iy), self.source(2, self.at["col0"], ix)
            w.line(f"const {t} in_h = {in_h}, in_w = {in_w};")
            bounds += [f"{unsigned(t)}(in_h) < {spec.sizes[1]}", f"{unsigned(t)}(in_w) < {spec.sizes[2]}"]
            channel = linear([(self.at["channel0"], 1), (strip, 1)])
            if spec.groups % s.channels:
                bounds.append(f"{channel} < {spec.groups}")
            image, _, _, *along = spec.x.strides
            terms = [(self.at["image"], image), (self.at["channel0"], 1), (strip, 1)]
            terms += zip((in_d, "in_h", "in_w"), along)
            w.line(f"Vector<{spec.x.dtype.ctype}, {vector}> value = {{}};")
            w.line(f"if ({' && '.join(bounds)}) value = load<{vector}>({self.x} + {linear(terms)});")
            w.line(f"store_shared(&tile[{iz}][{iy}][{ix}][{strip}], value);")

    def _slide(self, group: str, lane: str, tx: str) -> None:
        """Writes the sums, one column of taps after another: a row of the tile is read once for all outputs it
        touches.
        """
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        with w.scope():
            products = (s.rows + 1) * s.vector * spec.taps[1]  # and the loads of their weights
            iz = self.loop("iz", spec.taps[0], products * spec.taps[2] * spec.taps[0] <= UNROLLED)
            ks = self.loop("ks", spec.taps[2], products * spec.taps[2] <= UNROLLED)
            w.line(f"{c} column[{spec.taps[1]}][{s.vector}];")
            with w.scope():
                kr = self.loop("kr", spec.taps[1])
                e = self.loop("e", s.vector)
                taps = [self.reversed_tap(axis, n) for axis, n in enumerate((iz, kr, ks))]
                terms = [(linear([(group, 1), (e, 1)]), spec.w.strides[0]), *zip(taps, spec.w.strides[3:])]
                source = operand_value(spec.w, f"{self.weights}[{linear(terms)}]", c)
                w.line(f"column[{kr}][{e}] = {source};")
            iy, same = self.rows(True)
            place = linear([(tx, spec.stride[2]), (ks, spec.dilation[2])])
            w.line(f"const auto vec = load_shared<{s.vector}>(&tile[{iz}][{iy}][{place}][{lane}]);")
            p = self.loop("p", s.rows)
            kr = same or self.tap_row(iy, p)
            e = self.loop("e", s.vector)
            w.line(f"sum[{p}][{e}] += column[{kr}][{e}] * {operand_value(spec.x, f'vec[{e}]', c)};")


def _subscripts(sizes: tuple[int, ...]) -> str:
    return "".join(f"[{size}]" for size in sizes)


FAMILY = Family(
    "direct_convolution",
    DirectConvolutionSpec,
    (
        Form("strips", StripsSchedule, schedule.strips, lambda spec, s: Strips(spec, s).render()),
        Form("ring", RingSchedule, schedule.rings, lambda spec, s: Ring(spec, s).render()),
        Form("planes", PlanesSchedule, schedule.planes, lambda spec, s: _Planes(spec, s).render()),
        Form("channels", ChannelsSchedule, schedule.channels, lambda spec, s: _Channels(spec, s).render()),
    ),
    tries_all=True,
)
