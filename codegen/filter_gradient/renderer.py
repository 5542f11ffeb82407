"""The kernel of filter gradients of few channels a group.

A thread owns some neighbouring channels, and the filters that belong to them, and keeps their sums of all taps (or some
of them) in registers.  It walks over patches of positions: it reads the losses of a patch, then one row after another
of the image under it, and multiplies every element that it has read with all losses of the patch that a tap brings
together with it.  At last a block adds up what its threads have.
"""

from __future__ import annotations

from math import prod

from codegen.buffers import Edge, every, guard
from codegen.epilogue import Epilogue, operand_value
from codegen.expr import Operand
from codegen.filter_gradient.schedule import (
    FilterGradientSchedule,
    Span,
    blocks_per_sm,
    check_rows,
    lanes_of,
    pairs,
    patches,
    span,
    tap_tiles,
)
from codegen.filter_gradient.spec import FilterGradientSpec
from codegen.iteration import coordinate, linear, unsigned
from codegen.kernel import Kernel, locate, parameter
from codegen.sizes import below, least, most
from codegen.spec import KernelSource

#: Bytes of shared memory in which warps exchange sums.
EXCHANGE = 32 * 1024


def render(spec: FilterGradientSpec, schedule: FilterGradientSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(spec, schedule).render()


class _Renderer:
    def __init__(self, spec: FilterGradientSpec, schedule: FilterGradientSchedule) -> None:
        check_rows(spec, schedule)
        self.spec, self.s, self.t, self.w = spec, schedule, schedule.itype, Kernel(spec.name)
        names = self.w.names
        self.x, self.loss = names.unique(spec.x.name), names.unique(spec.loss.name)
        self.epilogue = Epilogue(self.w, spec.program, names, spec.space, spec.accumulate, spec.result)
        self.lanes, self.pairs = lanes_of(spec, schedule), pairs(spec, schedule)
        self.filters = schedule.channels if spec.depthwise else schedule.filters
        self.tap_rows, self.tap_cols = tap_tiles(spec, schedule)
        self.high, self.broad = patches(spec, schedule)
        self.down = span(spec, 1, schedule.rows, schedule.taps[0])
        self.across = span(spec, 2, schedule.cols, schedule.taps[1])

    def render(self) -> KernelSource:
        w, spec, s = self.w, self.spec, self.s
        taps = " x ".join(str(n) for n in spec.taps if n > 1 or prod(spec.taps) == 1)
        each = f"{s.channels} channels" if spec.depthwise else f"{s.channels} channels x {s.filters} filters"
        details = [
            f"filter gradient, {taps} taps; a thread sums up {s.taps[0]} x {s.taps[1]} taps of {each}, "
            f"{s.rows} x {s.cols} positions at a time"
        ]
        w.parameters += [parameter(spec.x, self.x), parameter(spec.loss, self.loss)]
        w.parameters += self.epilogue.pointers.parameters()
        blocks = self._locate()
        w.line(f"{spec.accumulate} sum[{prod(s.taps)}][{self.pairs}] = {{}};")
        self._walk()
        w.line()
        self.epilogue.scalars()
        self._add_up()
        return w.source(
            spec.program, details, blocks=blocks, threads=s.threads, barriers=True, blocks_per_sm=blocks_per_sm(spec, s)
        )

    # ---- where threads are

    def _locate(self) -> int:
        """Writes which channels and taps a thread has; returns the number of blocks."""
        w, s = self.w, self.s
        axes = [
            ("part", self.spec.parts, 1),
            ("tap_z", self.spec.taps[0], 1),
            ("tap_row", self.tap_rows.tiles, s.taps[0]),
            ("tap_col", self.tap_cols.tiles, s.taps[1]),
            ("lane0", self.lanes.tiles, s.lanes),
        ]
        blocks = locate(w, self.t, axes)
        self.at = {name: name if size > 1 else "0" for name, size, _ in axes}
        w.line("const int warp = threadIdx.x / 32;")
        walker = f"warp * {s.walkers} + threadIdx.x % {s.walkers}" if s.walkers > 1 else "warp"
        w.line(f"const int walker = {walker};")
        if s.lanes > 1:
            w.line(f"const int lane = threadIdx.x % 32{f' / {s.walkers}' if s.walkers > 1 else ''};")
        lane = linear([(self.at["lane0"], 1), ("lane" if s.lanes > 1 else "0", 1)])
        # Those of lanes that do not exist sum up others' once more.
        if self.lanes.ragged:
            lane = f"min({self.t}({lane}), {self.t}({self.lanes.total - 1}))"
        group, channel, filter = self._channels(lane, "")
        for name, operand, base, at in (
            ("images", self.spec.x, self.x, channel),
            ("losses", self.spec.loss, self.loss, filter),
        ):
            offset = linear([(group, operand.strides[1]), (at, operand.strides[2])])
            w.line(f"const {operand.dtype.ctype}* const {name} = {base} + {offset};")
        return blocks

    def _channels(self, lane: str, suffix: str) -> tuple[str, str, str]:
        """Writes the group of a lane, and its first channel and filter in it; returns their C expressions."""
        spec, s = self.spec, self.s
        sizes, scales = (spec.groups // s.channels, 1, 1), (s.channels, 1, 1)
        if not spec.depthwise:
            sizes = (spec.groups, spec.channels // s.channels, spec.filters // s.filters)
            scales = (1, s.channels, s.filters)
        if prod(sizes) == 1:
            return "0", "0", "0"
        at = f"at{suffix}"
        self.w.line(f"const {self.t} {at} = {lane};")
        found = []
        for d, (name, size, scale) in enumerate(zip(("group", "channel", "filter"), sizes, scales)):
            if size > 1:
                text = coordinate(at, sizes, d) + (f" * {scale}" if scale > 1 else "")
                self.w.line(f"const {self.t} {name}{suffix} = {text};")
            found.append(f"{name}{suffix}" if size > 1 else "0")
        return found[0], found[1], found[2]

    # ---- the sums

    def _walk(self) -> None:
        """Writes the loop over a thread's patches."""
        w, spec, s = self.w, self.spec, self.s
        bands = spec.bands
        each, every_patch = bands.size * self.high * self.broad, bands.total * self.high * self.broad
        first = linear([(self.at["part"], each), ("walker", 1)])
        end = str(every_patch)
        if spec.parts > 1:
            end = f"({self.at['part']} + 1) * {each}"
            end = end if below(spec.parts * each - 1, every_patch) else f"min({end}, {self.t}({every_patch}))"
            w.line(f"const {self.t} end = {end};")
            end = "end"
        w.line("#pragma unroll 1")
        step = s.warps * s.walkers
        with w.block(f"for ({self.t} patch = {first}; patch < {end}; patch += {step})"):
            self._patch()
            self._losses()
            self._image()

    def _patch(self) -> None:
        """Writes where a patch is: its image, its row and column, and the image's elements that begin under it."""
        w, spec, s = self.w, self.spec, self.s
        tall = Edge(spec.out[1], spec.band)
        sizes = (spec.images, spec.out[0], tall.tiles, self.high, self.broad)
        found = {}
        for d, (name, size) in enumerate(zip(("image", "z", "band", "down", "across"), sizes)):
            if most(size) > 1:
                w.line(f"const {self.t} {name} = {coordinate('patch', sizes, d)};")
            found[name] = name if most(size) > 1 else "0"
        row = linear([(found["band"], spec.band), (found["down"], s.rows)])
        w.line(f"const {self.t} row = {row}, col = {linear([(found['across'], s.cols)])};")
        self.row0 = (tall.tiles - 1) * spec.band + (self.high - 1) * s.rows
        if not below(self.row0, spec.out[1]):
            w.line(f"if (row >= {spec.out[1]}) continue;")
        begins = (("front", found["z"], "tap_z"), ("top", "row", "tap_row"), ("left", "col", "tap_col"))
        for d, (name, at, tap) in enumerate(begins):
            text = linear([(at, spec.stride[d]), (self.at[tap], spec.dilation[d])], -spec.before[d])
            w.line(f"const {self.t} {name} = {text};")
        for name, operand, base, of in (
            ("corner", spec.x, "images", ("front", "top", "left")),
            ("first_loss", spec.loss, "losses", (found["z"], "row", "col")),
        ):
            places = [(found["image"], operand.strides[0]), *zip(of, operand.strides[3:])]
            w.line(f"const {operand.dtype.ctype}* const {name} = {base} + {linear(places)};")

    def _missing(self, axis: int, position: str) -> str:
        """Returns the C condition that a row (1) or column (2) of a patch does not exist; empty if all do."""
        size, total = (0, self.s.rows, self.s.cols)[axis], self.spec.out[axis]
        row0 = self.row0 if below(self.row0, total) else total - 1
        last = (0, row0, (self.broad - 1) * self.s.cols)[axis]
        ragged = not below(last + size - 1, total) and (axis == 2 or total % size != 0)
        return f"{position} >= {total}" if ragged else ""

    def _losses(self) -> None:
        """Writes the reads of a patch's losses."""
        w, spec, s, n = self.w, self.spec, self.s, self.filters
        w.line(f"Packed<{spec.loss.dtype.ctype}, {n}> loaded[{s.rows}][{s.cols}];")
        with w.scope():
            b, u = w.each("b", s.rows), w.each("u", s.cols)
            missing = [x for x in (self._missing(1, f"row + {b}"), self._missing(2, f"col + {u}")) if x]
            there = f"!({' || '.join(missing)})" if missing else ""
            offset = linear([(b, spec.loss.strides[4]), (u, spec.loss.strides[5])])
            w.line(f"loaded[{b}][{u}] = {self._load(n, there, 'first_loss', offset)};")
        w.line(f"{spec.accumulate} loss_at[{s.rows}][{s.cols}][{n}];")
        with w.scope():
            b, u, e = w.each("b", s.rows), w.each("u", s.cols), w.each("e", n)
            w.line(f"loss_at[{b}][{u}][{e}] = {self._value(spec.loss, f'loaded[{b}][{u}][{e}]')};")

    def _load(self, count: int, there: str, pointer: str, offset: str) -> str:
        place = pointer if offset == "0" else f"{pointer} + {offset}"
        return f"load_if<{count}>({there}, {place})" if there else f"load<{count}>({place})"

    def _value(self, operand: Operand, text: str) -> str:
        return operand_value(operand, text, self.spec.accumulate)

    def _image(self) -> None:
        """Writes the reads of the image under a patch, row by row, and all products of each."""
        w, spec = self.w, self.spec
        down, across, n = self.down, self.across, self.s.channels
        with w.scope():
            i = w.each("i", down.places)
            if down.touched != (1 << down.places) - 1:
                w.line(f"if (!({down.touched:#x}ull >> {i} & 1)) continue;  // no tap touches this row")
            w.line(f"Packed<{spec.x.dtype.ctype}, {n}> line[{across.places}];")
            exists = every(self._depth(), self._exists(1, "top", i, down))
            if exists:
                w.line(f"const bool row_there = {exists};")
            self._read_line(i, "row_there" if exists else "")
            w.line(f"{spec.accumulate} under[{across.places}][{n}];")
            with w.scope():
                j, e = w.each("j", across.places), w.each("e", n)
                text = self._value(spec.x, f"line[{j}][{e}]")
                w.line(f"{guard(self._touched(j))}under[{j}][{e}] = {text};")
            self._multiply(i)

    def _read_line(self, i: str, exists: str) -> None:
        w, spec, across, n = self.w, self.spec, self.across, self.s.channels
        with w.scope():
            j = w.each("j", across.places)
            there = every(exists, self._exists(2, "left", j, across))
            steps = (self.down.step * spec.x.strides[4], across.step * spec.x.strides[5])
            offset = linear([(i, steps[0]), (j, steps[1])])
            w.line(f"{guard(self._touched(j))}line[{j}] = {self._load(n, there, 'corner', offset)};")

    def _touched(self, j: str) -> str:
        across = self.across
        return "" if across.touched == (1 << across.places) - 1 else f"{across.touched:#x}ull >> {j} & 1"

    def _depth(self) -> str:
        """Returns the C condition that the image's plane exists; empty if it always does."""
        spec = self.spec
        last = (spec.out[0] - 1) * spec.stride[0] + (spec.taps[0] - 1) * spec.dilation[0] - spec.before[0]
        inside = spec.before[0] <= 0 and below(last, spec.sizes[0])
        return "" if inside else f"{unsigned(self.t)}(front) < {spec.sizes[0]}"

    def _exists(self, axis: int, start: str, place: str, of: Span) -> str:
        """Returns the C condition that a row (1) or column (2) of the image exists; empty if it always does.

        For a place whose condition always holds it is a constant.
        """
        spec, size, before = self.spec, self.spec.sizes[axis], self.spec.before[axis]
        tiles, each = (self.tap_rows, self.s.taps[0]) if axis == 1 else (self.tap_cols, self.s.taps[1])
        last = (self.row0 if axis == 1 else (self.broad - 1) * self.s.cols) * spec.stride[axis]
        last += (tiles.tiles - 1) * each * spec.dilation[axis] - before
        low, high = -(-max(before, 0) // of.step), min(-(-least(size - last) // of.step), of.places)
        if low == 0 and high >= of.places:
            return ""
        text = f"{unsigned(self.t)}({linear([(start, 1), (place, of.step)])}) < {size}"
        return f"({place} >= {low} && {place} < {high} || {text})" if low < high and place != "0" else f"({text})"

    def _multiply(self, i: str) -> None:
        """Writes the products of a row of the image with all losses that taps bring together with it."""
        w, s, down, across = self.w, self.s, self.down, self.across
        with w.scope():
            b = w.each("b", s.rows)
            over = linear([(i, 1), (b, -down.stride)])
            if over != "0":
                w.line(f"const int over = {over};")
                odd = f" || over % {down.dilation}" if down.dilation > 1 else ""
                w.line(f"if (over < 0{odd} || over >= {(s.taps[0] - 1) * down.dilation + 1}) continue;")
                over = "over" if down.dilation == 1 else f"over / {down.dilation}"
            w.leave(self._missing(1, f"row + {b}"))
            u = w.each("u", s.cols)
            w.leave(self._missing(2, f"col + {u}"))
            tap = w.each("tap", s.taps[1])
            place = linear([(u, across.stride), (tap, across.dilation)])
            e = w.each("e", self.pairs)
            channel, filter = e, e
            if not self.spec.depthwise:
                channel = "0" if s.channels == 1 else f"{e} % {s.channels}"
                filter = "0" if s.filters == 1 else f"{e} / {s.channels}" if s.channels > 1 else e
            at = linear([(over if over == "0" or over.isidentifier() else f"({over})", s.taps[1]), (tap, 1)])
            w.line(f"sum[{at}][{e}] += loss_at[{b}][{u}][{filter}] * under[{place}][{channel}];")

    # ---- the results

    def _add_up(self) -> None:
        """Writes how a block adds up its threads' sums, so many at a time, and the program on each."""
        w, spec, s = self.w, self.spec, self.s
        taps = prod(s.taps)
        each = self.pairs * s.lanes
        most = max(1, min(taps, EXCHANGE // (4 * spec.words * s.warps * each)))
        shared = w.exchange("exchange", "", spec.accumulate, s.warps, most, self.pairs, s.lanes)
        with w.scope():
            first = "0"
            if most < taps:
                w.line("#pragma unroll")
                w.open(f"for (int first = 0; first < {taps}; first += {most})")
                w.line("__syncthreads();  // what was exchanged before has been read")
                first = "first"
            with w.scope():
                k = w.each("k", most)
                tap = linear([(first, 1), (k, 1)])
                w.leave(Edge(taps, most).outside(tap))
                e = w.each("e", self.pairs)
                own = f"sum[{tap}][{e}]"
                if s.walkers > 1:
                    w.line(f"const {spec.accumulate} total = reduce::lanes<reduce::Add, {s.walkers}>({own});")
                    own = "total"
                to = f"{shared}[warp][{k}][{e}][{'lane' if s.lanes > 1 else '0'}]"
                w.line(f"{guard(f'threadIdx.x % {s.walkers} == 0' if s.walkers > 1 else '')}{to} = {own};")
            w.line("__syncthreads();")
            count = f"min({most}, {taps} - {first})" if taps % most else str(most)
            with w.block(f"for (int n = threadIdx.x; n < {count} * {each}; n += {s.threads})"):
                self._result(shared, first, each)

    def _result(self, shared: str, first: str, each: int) -> None:
        """Writes the n-th of the sums that have been exchanged."""
        w, spec, s = self.w, self.spec, self.s
        e = "e" if self.pairs > 1 else "0"
        if self.pairs > 1:
            w.line(f"const int e = n % {self.pairs};")
        from_ = "from" if s.lanes > 1 else "0"
        if s.lanes > 1:
            across = f"n / {self.pairs}" if self.pairs > 1 else "n"
            w.line(f"const int from = {across} % {s.lanes};")
        w.line(f"const int k = n{f' / {each}' if each > 1 else ''};")
        own = linear([(self.at["lane0"], 1), (from_, 1)])
        w.leave(self.lanes.outside(own))
        tap = linear([(first, 1), ("k", 1)])
        w.line(f"const int tap = {tap};")
        taps = [self.at["tap_z"]]
        for name, edge, text in (
            ("tap_row", self.tap_rows, f"tap / {s.taps[1]}"),
            ("tap_col", self.tap_cols, f"tap % {s.taps[1]}"),
        ):
            w.line(f"const {self.t} {name}_at = {linear([(self.at[name], 1), (text, 1)])};")
            w.leave(edge.outside(f"{name}_at"))
            taps.append(f"{name}_at")
        w.line(f"{spec.accumulate} total = {shared}[0][k][{e}][{from_}];")
        w.unrolled_line(f"for (int other = 1; other < {s.warps}; ++other) total += {shared}[other][k][{e}][{from_}];")
        group, channel, filter = self._channels(own, "_own")
        if spec.depthwise:
            group = linear([(group, 1), (e, 1)])
        else:
            channel, filter = (
                linear([(channel, 1), (f"{e} % {s.channels}" if s.channels > 1 else "0", 1)]),
                linear([(filter, 1), (f"{e} / {s.channels}" if s.filters > 1 else "0", 1)]),
            )
        if spec.flip:
            taps = [f"({size - 1} - {tap})" if size > 1 else tap for tap, size in zip(taps, spec.taps)]
        self.epilogue.results([self.at["part"], group, filter, channel, *taps], ["total"])
