"""The window family: direct convolutions with few channels a group, each input element read into a halo tile once.

A block loads the part of the input under its tile of outputs into shared memory, padding included, and every thread
slides over it.  Two forms:

planes    threads side by side take neighbouring columns of one image plane (NCHW, single-channel images, few channels);
          a thread computes a patch of rows x columns for every filter of its group, from rows it reads as vectors;
channels  depthwise convolutions whose channels are contiguous (NHWC): threads side by side take neighbouring channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

from codegen.epilogue import Epilogue, Run, factor
from codegen.iteration import coordinate, linear, unsigned
from codegen.kernel import headers, heading, locate, parameter, signature
from codegen.naming import Names, Writer
from codegen.spec import KernelSource, WindowSpec
from codegen.window_schedule import (
    PATCH_COLUMNS,
    ChannelsSchedule,
    PlanesSchedule,
    WindowSchedule,
    best_schedule,
    line_reads,
    pitch,
    tile_sizes,
)

#: Products a thread's code spells out; loops whose bodies add up to more stay loops, so that the code fits the caches.
UNROLLED = 800

#: C names that the kernels use themselves.
_TAKEN = """
block image group plane plane0 channel0 depth row0 col0 row col t tx ty tz tile weights column under sum vec value strip
line lane inside at z ic iz iy ix kr ks p q f e in_d in_h in_w
"""


def render(spec: WindowSpec, schedule: WindowSchedule | None = None) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    s = schedule or best_schedule(spec)
    return (_Planes(spec, s) if isinstance(s, PlanesSchedule) else _Channels(spec, s)).render()


class _Renderer(ABC):
    """What both forms share: the heading, where a block is, which taps meet which rows."""

    def __init__(self, spec: WindowSpec, schedule: WindowSchedule) -> None:
        self.spec, self.t, self.w = spec, schedule.itype, Writer()
        self.threads, self.patch_rows = schedule.threads, schedule.rows
        self.names = Names([spec.name, *_TAKEN.split()])
        self.x = self.names.unique(spec.x.name)
        self.weights = self.names.unique(spec.w.name)
        space = (spec.images, spec.groups, spec.filters, *spec.out)
        self.epilogue = Epilogue(self.w, spec.program, self.names, space, spec.accumulate, spec.result)
        self.depth, self.tile_rows, self.tile_cols = tile_sizes(spec, schedule)
        #: where the block is: each coordinate's C variable, "0" where there is only one
        self.at: dict[str, str] = {}

    def render(self) -> KernelSource:
        w, spec = self.w, self.spec
        program = spec.program
        count = len(program.notes)
        taps = " x ".join(str(n) for n in spec.taps if n > 1 or prod(spec.taps) == 1)
        details = [f"direct convolution, {taps} taps; {self.describe()}"]
        title = f"{spec.name}: {count} {'nodes in one kernel' if count != 1 else 'node'}"
        heading(w, title, program, headers(program, "memory.cuh"), details)
        parameters = [parameter(spec.x, self.x), parameter(spec.w, self.weights)]
        # Told that one block a multiprocessor is enough, ptxas does not spill to fit more of them.
        signature(w, spec.name, self.threads, parameters + self.epilogue.pointers.parameters(), 1)
        blocks = self.body()
        w.close()
        return KernelSource(spec.name, w.text(), (blocks, 1, 1), (self.threads, 1, 1), uses_barriers=True)

    @abstractmethod
    def describe(self) -> str:
        """What a block and a thread compute, for the heading."""

    @abstractmethod
    def body(self) -> int:
        """Writes the kernel's body; returns the number of blocks."""

    def locate(self, axes: list[tuple[str, int, int]]) -> int:
        """Writes which outputs the block computes; returns the number of blocks."""
        self.at = {name: name if blocks > 1 else "0" for name, blocks, _ in axes}
        return locate(self.w, self.t, axes)

    def constant(self, name: str, value: str, itype: str | None = None) -> str:
        """Writes a named constant, unless it is a number or a name already; returns what to call it."""
        if value.isidentifier() or value.isdigit():
            return value
        self.w.line(f"const {itype or self.t} {name} = {value};")
        return name

    def loop(self, name: str, count: int, unroll: bool = True) -> str:
        """Opens a loop; returns its variable, or "0" without a loop if it runs once."""
        if count == 1:
            return "0"
        self.w.line("#pragma unroll" if unroll else "#pragma unroll 1")
        self.w.open(f"for (int {name} = 0; {name} < {count}; ++{name})")
        return name

    def close_to(self, depth: int) -> None:
        """Closes the loops opened since the writer was at a depth."""
        while self.w.depth > depth:
            self.w.close()

    def rows(self, unroll: bool) -> tuple[str, str]:
        """Opens the loop over the rows of the tile under a patch: (row, row of taps if all of it has one)."""
        spec = self.spec
        if self.patch_rows == 1:
            kr = self.loop("kr", spec.taps[1], unroll)
            return linear([(kr, spec.dilation[1])]), kr
        count = (self.patch_rows - 1) * spec.stride[1] + (spec.taps[1] - 1) * spec.dilation[1] + 1
        return self.loop("iy", count, unroll), ""

    def tap_row(self, iy: str, p: str) -> str:
        """Writes which row of taps meets row ``iy`` of the tile for output row ``p``; skips it if none."""
        w, spec = self.w, self.spec
        dh, taps = spec.dilation[1], spec.taps[1]
        below = linear([(iy, 1), (p, -spec.stride[1])])
        conditions = [f"{below} >= 0", f"{below} < {(taps - 1) * dh + 1}"] if taps > 1 else [f"{below} == 0"]
        if dh > 1 and taps > 1:
            conditions.append(f"({below}) % {dh} == 0")
        w.line(f"if (!({' && '.join(conditions)})) continue;  // no tap of output row {p} meets this row")
        if taps == 1:
            return "0"
        w.line(f"const int kr = {below if dh == 1 else f'({below}) / {dh}'};")
        return "kr"

    def source(self, axis: int, out: str, local: str) -> str:
        """The input coordinate of a tile position along a spatial axis."""
        spec = self.spec
        return linear([(out, spec.stride[axis]), (local, 1)], -spec.before[axis])

    def source_depth(self, iz: str) -> tuple[str, list[str]]:
        """Writes the input plane that a tap plane reads: (its C variable, the conditions under which it exists)."""
        spec = self.spec
        if spec.sizes[0] == spec.taps[0] == spec.out[0] == 1 and not spec.before[0]:
            return "0", []
        place = linear([(self.at["depth"], spec.stride[0]), (iz, spec.dilation[0])], -spec.before[0])
        self.w.line(f"const {self.t} in_d = {place};")
        return "in_d", [f"{unsigned(self.t)}(in_d) < {spec.sizes[0]}"]

    def reversed_tap(self, axis: int, tap: str) -> str:
        """The filter coordinate that a tap multiplies."""
        return f"({self.spec.taps[axis] - 1} - {tap})" if self.spec.flip and self.spec.taps[axis] > 1 else tap


class _Planes(_Renderer):
    def __init__(self, spec: WindowSpec, schedule: PlanesSchedule) -> None:
        super().__init__(spec, schedule)
        self.s = schedule
        self.pitch, self.reads = pitch(spec, schedule), line_reads(spec, schedule)

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
            self.constant(name, coordinate("t", shape, d), "int") if shape[d] > 1 else "0"
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
        depth = w.depth
        f, p = self.loop("f", spec.filters), self.loop("p", s.rows)
        down = linear([(row, 1), (p, 1)])
        if spec.out[1] % s.rows:
            w.line(f"if ({down} >= {spec.out[1]}) break;")
        position = [image, group, f, self.at["depth"], down, col]
        whole = spec.out[2] % s.cols == 0
        run = Run(s.cols, 5, "q", None if whole else lambda q: f"{linear([(col, 1), (q, 1)])} >= {spec.out[2]}")
        self.epilogue.results(position, f"sum[{f}][{p}][{'q' if s.cols > 1 else '0'}]", run)
        self.close_to(depth)
        return blocks

    def _plane_of(self, plane: str) -> tuple[str, str]:
        """Writes image and group of a plane; returns their C variables."""
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
        w.open(f"for (int at = t; at < {count}; at += {self.threads})")
        plane, *names = ("0" if size == 1 else f"({coordinate('at', sizes, d)})" for d, size in enumerate(sizes))
        group = self.at.get("group", "0")
        if s.planes > 1:
            # A block's last planes may not exist: what is staged for them is that of other groups, and not used.
            where = linear([(self.at["plane0"], 1), (plane, 1)])
            group = f"(({where}) % {spec.groups})" if spec.groups > 1 else "0"
        names = names[:2] + [self.reversed_tap(a, n) if n != "0" else n for a, n in enumerate(names[2:])]
        terms = [(group, spec.w.strides[0]), *zip(names, spec.w.strides[1:])]
        first = "[0]" * (5 + (s.planes > 1))
        source = factor(spec.w, f"{self.weights}[{linear(terms)}]", spec.accumulate)
        w.line(f"(&weights{first})[at] = {source};")
        w.close()

    def _stage_tile(self) -> None:
        """Runs of lanes take one row of the halo tile after another; outside the image is zero."""
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
        w.open(f"for (int line = t / {lanes}; line < {prod(sizes)}; line += {self.threads // lanes})")
        z, ic, iz, iy = (
            self.constant(name, coordinate("line", sizes, d), "int") if sizes[d] > 1 else "0"
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
            w.line(f"const int ic = at % {spec.in_channels}, ix = at / {spec.in_channels};")
            ic = "ic"
        elif lanes > 1:
            w.open(f"for (int ix = t % {lanes}; ix < {width}; ix += {lanes})")
        else:
            w.open(f"for (int ix = 0; ix < {width}; ++ix)")
        w.line(f"const {t} in_w = {self.source(2, self.at['col0'], ix)};")
        terms = list(zip((image, group, ic, in_d, "in_h", "in_w"), spec.x.strides))
        value = factor(spec.x, f"{self.x}[{linear(terms)}]", spec.accumulate)
        plane = f"[{z}]" if s.planes > 1 else ""
        inside_row = f"inside && {unsigned(t)}(in_w) < {spec.sizes[2]}"
        w.line(f"tile{plane}[{ic}][{iz}][{iy}][{ix}] = {inside_row} ? {value} : {spec.accumulate}(0);")
        w.close()
        w.close()

    def _slide(self, plane: str, ty: str, tx: str) -> None:
        """Every row of the tile under the patch is read once and used by all outputs it touches."""
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        sh, sw, dw = spec.stride[1], spec.stride[2], spec.dilation[2]
        depth = w.depth
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
                w.open(f"for (int ix = 0; ix < {reads}; ix += {PATCH_COLUMNS})")
                w.line(f"const auto vec = load_shared<{PATCH_COLUMNS}>(&{start}[{first}]);")
                w.line("#pragma unroll")
                w.line(f"for (int e = 0; e < {PATCH_COLUMNS}; ++e) under[ix + e] = vec[e];")
                w.close()
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
        self.close_to(depth)


class _Channels(_Renderer):
    def __init__(self, spec: WindowSpec, schedule: ChannelsSchedule) -> None:
        super().__init__(spec, schedule)
        self.s = schedule

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
        lane = self.constant("lane", linear([(places[0], s.vector)]), "int")
        tx = self.constant("tx", places[1], "int")
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
        depth = w.depth
        p = self.loop("p", s.rows)
        down = linear([(self.at["row0"], 1), (p, 1)])
        if spec.out[1] % s.rows:
            w.line(f"if ({down} >= {spec.out[1]}) break;")
        position = [self.at["image"], group, "0", self.at["depth"], down, col]
        # The channels of a thread all exist: its vector divides their number.
        self.epilogue.results(position, f"sum[{p}][{'e' if s.vector > 1 else '0'}]", Run(s.vector, 1, "e"))
        self.close_to(depth)
        return blocks

    def _stage_tile(self) -> None:
        """Runs of channels go to shared memory as they are stored, 16 bytes at a time where they are aligned."""
        w, spec, s, t = self.w, self.spec, self.s, self.t
        vector = self._vector()
        sizes = (self.depth, self.tile_rows, self.tile_cols, s.channels // vector)
        w.line("#pragma unroll 4")
        w.open(f"for (int at = threadIdx.x; at < {prod(sizes)}; at += {s.threads})")
        iz, iy, ix, strip = (
            self.constant(name, linear([(coordinate("at", sizes, d), vector if d == 3 else 1)]), "int")
            if sizes[d] > 1
            else "0"
            for d, name in enumerate(("iz", "iy", "ix", "strip"))
        )
        in_d, bounds = self.source_depth(iz)
        w.line(f"const {t} in_h = {self.source(1, self.at['row0'], iy)}, in_w = {self.source(2, self.at['col0'], ix)};")
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
        w.close()

    def _vector(self) -> int:
        """Channels of one access: all pixels must start at a multiple of it."""
        spec, size = self.spec, self.spec.x.dtype.itemsize
        steps = [s for s, many in zip(spec.x.strides, (spec.images, 1, 1, *spec.sizes)) if many > 1]
        for vector in (16 // size, 8 // size, 4 // size, 2 // size):
            whole = vector > 0 and self.s.channels % vector == 0 and spec.groups % vector == 0
            if whole and spec.x.alignment % (vector * size) == 0 and all(s % vector == 0 for s in steps):
                return vector
        return 1

    def _slide(self, group: str, lane: str, tx: str) -> None:
        """Columns of taps pass by one after another: a row of the tile is read once for all outputs it touches."""
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        depth = w.depth
        products = (s.rows + 1) * s.vector * spec.taps[1]  # and the loads of their weights
        iz = self.loop("iz", spec.taps[0], products * spec.taps[2] * spec.taps[0] <= UNROLLED)
        ks = self.loop("ks", spec.taps[2], products * spec.taps[2] <= UNROLLED)
        w.line(f"{c} column[{spec.taps[1]}][{s.vector}];")
        inner = w.depth
        kr = self.loop("kr", spec.taps[1])
        e = self.loop("e", s.vector)
        taps = [self.reversed_tap(axis, n) for axis, n in enumerate((iz, kr, ks))]
        terms = [(linear([(group, 1), (e, 1)]), spec.w.strides[0]), *zip(taps, spec.w.strides[3:])]
        source = factor(spec.w, f"{self.weights}[{linear(terms)}]", c)
        w.line(f"column[{kr}][{e}] = {source};")
        self.close_to(inner)
        iy, same = self.rows(True)
        place = linear([(tx, spec.stride[2]), (ks, spec.dilation[2])])
        w.line(f"const auto vec = load_shared<{s.vector}>(&tile[{iz}][{iy}][{place}][{lane}]);")
        p = self.loop("p", s.rows)
        kr = same or self.tap_row(iy, p)
        e = self.loop("e", s.vector)
        w.line(f"sum[{p}][{e}] += column[{kr}][{e}] * {factor(spec.x, f'vec[{e}]', c)};")
        self.close_to(depth)


def _subscripts(sizes: tuple[int, ...]) -> str:
    return "".join(f"[{size}]" for size in sizes)
