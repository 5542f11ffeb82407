"""The window family: direct convolutions with few channels a group, each input element read into a halo tile once.

A block loads the part of the input under its tile of outputs into shared memory, padding included, and every thread slides
over it.  Two forms:

planes    threads side by side take neighbouring columns of one image plane (NCHW, single-channel images, few channels);
          a thread computes a patch of rows x columns for every filter of its group, from rows it reads as vectors;
channels  depthwise convolutions whose channels are contiguous (NHWC): threads side by side take neighbouring channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from codegen.expr import Anchor, Emitter, Index, Load, Operand, Value, ctype_of, varying
from codegen.iteration import Strides, coordinate, extent, index_type, linear
from codegen.kernel import Pointers, converted, heading, headers, parameter, signature
from codegen.naming import Names, Writer
from codegen.spec import KernelSource, WindowSpec

SHARED_LIMIT = 48 * 1024
PATCH_COLUMNS = 4
LANES = 32


@dataclass(frozen=True)
class WindowSchedule:
    """form: "planes" or "channels".

    planes    a block has 32 x warps threads, each a patch of ``rows`` x ``cols`` outputs.
    channels  a block has ``lanes`` x ``warps`` threads: lanes of ``vector`` channels each, ``warps`` columns; every
              thread computes ``rows`` rows of its column (``cols`` is 1).
    """

    form: str
    rows: int
    cols: int
    warps: int
    lanes: int
    vector: int
    itype: str

    @property
    def threads(self) -> int:
        return self.lanes * self.warps


def fits(spec: WindowSpec) -> str | None:
    """Why no halo tile of a spec fits shared memory; None if one does."""
    schedule = best_schedule(spec)
    needed = shared_bytes(spec, schedule)
    return None if needed <= SHARED_LIMIT else f"a halo tile of {needed} bytes does not fit {SHARED_LIMIT} bytes"


def channels_last(spec: WindowSpec) -> bool:
    """Whether neighbouring channels are neighbours in memory and each is convolved with one filter of its own."""
    return spec.in_channels == 1 and spec.filters == 1 and spec.groups >= 8 and spec.x.strides[1] == 1


def best_schedule(spec: WindowSpec) -> WindowSchedule:
    """The schedule used when nothing was tuned: the largest tile that fits, shrunk until the outputs fill it."""
    itype = _itype(spec)
    if channels_last(spec):
        return _channels_schedule(spec, itype)
    rows, cols = (
        (4, PATCH_COLUMNS) if spec.filters <= 2 else (2, PATCH_COLUMNS) if spec.filters <= 4 else (1, PATCH_COLUMNS)
    )
    warps = 8
    while warps > 1 and (warps // 2) * rows >= spec.out[1]:
        warps //= 2
    schedule = WindowSchedule("planes", rows, cols, warps, LANES, 1, itype)
    for smaller in (
        dict(rows=min(rows, 2)),
        dict(rows=1),
        dict(rows=1, warps=min(warps, 4)),
        dict(rows=1, cols=1, warps=min(warps, 4)),
        dict(rows=1, cols=1, warps=1),
    ):
        if shared_bytes(spec, schedule) <= SHARED_LIMIT:
            break
        schedule = WindowSchedule(
            "planes", smaller.get("rows", rows), smaller.get("cols", cols), smaller.get("warps", warps), LANES, 1, itype
        )
    return schedule


def _channels_schedule(spec: WindowSpec, itype: str) -> WindowSchedule:
    products = prod(spec.taps)
    vector = next(v for v in (4, 2, 1) if spec.groups % v == 0 and (v * products <= 64 or v == 1))
    wanted = max(1, 128 // spec.x.dtype.itemsize // vector)  # lanes for 128 contiguous bytes
    lanes = 1
    while lanes < min(wanted, 32) and lanes * vector < spec.groups:
        lanes *= 2
    columns = range(max(1, 128 // lanes), 256 // lanes + 1)
    width = spec.out[2]
    warps = min(columns, key=lambda c: (-(-width // c) * c, -c))
    schedule = WindowSchedule("channels", 8, 1, warps, lanes, vector, itype)
    while shared_bytes(spec, schedule) > SHARED_LIMIT or schedule.rows // 2 >= spec.out[1]:
        rows, warps = schedule.rows // 2, schedule.warps
        if rows == 0:
            rows, warps = 1, schedule.warps // 2
            if warps == 0:
                break
        schedule = WindowSchedule("channels", rows, 1, warps, lanes, vector, itype)
    return schedule


def _itype(spec: WindowSpec) -> str:
    space = (spec.images, spec.groups, spec.filters, *spec.out)
    reach = [prod(space), extent((spec.images, spec.groups, spec.in_channels, *spec.sizes), spec.x.strides)]
    reach += [extent(space, op.strides) for op in spec.program.operands]
    return "int32" if index_type(*(2 * r for r in reach)) == "uint32" else "int64"


def tile_sizes(spec: WindowSpec, s: WindowSchedule) -> tuple[int, int, int]:
    """(planes, rows, columns) of the halo tile of one channel.  Depth needs only the planes that taps touch."""
    out_rows = s.rows * (s.warps if s.form == "planes" else 1)
    out_cols = s.cols * s.lanes if s.form == "planes" else s.warps
    rows = (out_rows - 1) * spec.stride[1] + (spec.taps[1] - 1) * spec.dilation[1] + 1
    cols = (out_cols - 1) * spec.stride[2] + (spec.taps[2] - 1) * spec.dilation[2] + 1
    return spec.taps[0], rows, cols


def _row_reads(spec: WindowSpec, s: WindowSchedule) -> int:
    """Elements of a tile row that one thread's patch covers, in whole vectors of four."""
    span = (s.cols - 1) * spec.stride[2] + (spec.taps[2] - 1) * spec.dilation[2] + 1
    return -(-span // PATCH_COLUMNS) * PATCH_COLUMNS


def _pitch(spec: WindowSpec, s: WindowSchedule) -> int:
    """Elements from one row of a plane's tile to the next: a multiple of four, with room for the last thread's reads."""
    last = (s.lanes - 1) * s.cols * spec.stride[2] + _row_reads(spec, s)
    return -(-max(last, tile_sizes(spec, s)[2]) // PATCH_COLUMNS) * PATCH_COLUMNS


def _element_bytes(ctype: str) -> int:
    return 8 if ctype in ("double", "uint64") else 4


def shared_bytes(spec: WindowSpec, s: WindowSchedule) -> int:
    """Static shared memory of a block, in bytes."""
    planes, rows, cols = tile_sizes(spec, s)
    size = _element_bytes(spec.accumulate)
    if s.form == "channels":
        return planes * rows * cols * s.lanes * s.vector * spec.x.dtype.itemsize
    weights = spec.filters * spec.in_channels * prod(spec.taps)
    return (spec.in_channels * planes * rows * _pitch(spec, s) + weights) * size


def render(spec: WindowSpec, schedule: WindowSchedule | None = None) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    s = schedule or best_schedule(spec)
    return (_Channels if s.form == "channels" else _Planes)(spec, s).render()


class _Renderer:
    """What both forms share: the heading, where a block is, the program on the results."""

    #: (image, group, filter, depth, row, column) as C expressions, set before the program is written
    position: list[str]

    def __init__(self, spec: WindowSpec, schedule: WindowSchedule) -> None:
        self.spec, self.s, self.t, self.w = spec, schedule, schedule.itype, Writer()
        self.names = Names(
            {
                spec.name,
                "block",
                "image",
                "group",
                "depth",
                "row0",
                "col0",
                "tile",
                "weights",
                "sum",
                "row",
                "col",
                "tx",
                "ty",
            }
            | {
                "ic",
                "iz",
                "iy",
                "ix",
                "kr",
                "ks",
                "p",
                "q",
                "f",
                "e",
                "in_d",
                "in_h",
                "in_w",
                "line",
                "inside",
                "at",
                "lane",
            }
            | {"channel0", "vec", "value", "strip"}
        )
        self.x = self.names.unique(spec.x.name)
        self.weights = self.names.unique(spec.w.name)
        self.pointers = Pointers(spec.program, self.names)
        self.emitter = Emitter(spec.program, self.names)
        self.terms: dict[Value, str] = {}
        self._loops = 0
        #: where the block is: each coordinate's C variable, "0" where there is only one
        self.at: dict[str, str] = {}
        _, self.tile_rows, self.tile_cols = tile_sizes(spec, schedule)

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        program = spec.program
        count = len(program.notes)
        taps = " x ".join(str(n) for n in spec.taps if n > 1 or prod(spec.taps) == 1)
        details = [f"direct convolution, {taps} taps; {self.describe()}"]
        title = f"{spec.name}: {count} {'nodes in one kernel' if count != 1 else 'node'}"
        heading(w, title, program, headers(program, "memory.cuh"), details)
        parameters = [parameter(spec.x, self.x), parameter(spec.w, self.weights)]
        signature(w, spec.name, s.threads, parameters + self.pointers.parameters())
        blocks = self.body()
        w.close()
        return KernelSource(spec.name, w.text(), (blocks, 1, 1), (s.threads, 1, 1), uses_barriers=True)

    def describe(self) -> str:
        raise NotImplementedError

    def body(self) -> int:
        raise NotImplementedError

    def locate(self, channel_blocks: int, out_rows: int, out_cols: int) -> int:
        """Writes which outputs the block computes; returns the number of blocks."""
        w, spec, t = self.w, self.spec, self.t
        sizes = (
            spec.images,
            channel_blocks,
            spec.out[0],
            -(-spec.out[1] // out_rows),
            -(-spec.out[2] // out_cols),
        )
        names = ("image", "channel0" if self.s.form == "channels" else "group", "depth", "row0", "col0")
        scales = (1, self.s.lanes * self.s.vector if self.s.form == "channels" else 1, 1, out_rows, out_cols)
        w.line(f"const {t} block = blockIdx.x;")
        self.at = {name: name if size > 1 else "0" for name, size in zip(names, sizes)}
        for d, (name, size, scale) in enumerate(zip(names, sizes, scales)):
            if size > 1:
                w.line(f"const {t} {name} = {coordinate('block', sizes, d)}{f' * {scale}' if scale > 1 else ''};")
        return prod(sizes)

    def loop(self, name: str, count: int) -> str:
        """Opens an unrolled loop; returns its variable, or "0" without a loop if it runs once."""
        if count == 1:
            return "0"
        self.w.line("#pragma unroll")
        self.w.open(f"for (int {name} = 0; {name} < {count}; ++{name})")
        self._loops += 1
        return name

    def tap_row(self, iy: str, p: str) -> str:
        """Writes which row of taps row ``iy`` of the tile meets for output row ``p``, skipping it if none; returns it."""
        w, spec = self.w, self.spec
        sh, dh, taps = spec.stride[1], spec.dilation[1], spec.taps[1]
        if iy == "0":
            return "0"
        if p == "0" and dh == 1:
            return iy
        below = linear([(iy, 1), (p, -sh)])
        conditions = [f"{below} >= 0", f"{below} < {(taps - 1) * dh + 1}"] if p != "0" else []
        if dh > 1:
            conditions.append(f"({below}) % {dh} == 0")
        w.line(f"if (!({' && '.join(conditions)})) continue;  // no tap of output row {p} meets this row")
        if taps == 1:
            return "0"
        w.line(f"const int kr = {below if dh == 1 else f'({below}) / {dh}'};")
        return "kr"

    def end_loops(self) -> None:
        """Closes the loops that `loop` opened."""
        for _ in range(self._loops):
            self.w.close()
        self._loops = 0

    def source(self, axis: int, out: str, local: str) -> str:
        """The input coordinate of a tile position along a spatial axis."""
        spec = self.spec
        return linear([(out, spec.stride[axis]), (local, 1)], -spec.before[axis])

    def reversed_tap(self, axis: int, tap: str) -> str:
        """The filter coordinate that a tap multiplies."""
        return f"({self.spec.taps[axis] - 1} - {tap})" if self.spec.flip and self.spec.taps[axis] > 1 else tap

    def scalars(self) -> None:
        """Operands with one value and what depends on them alone."""
        program = self.spec.program
        for n, operand in enumerate(program.loads):
            if not any(operand.strides):
                name = self.names.unique(operand.name, "_s")
                text = converted(operand, f"{self.pointers.loads[n]}[0]", program.real)
                self.w.line(f"const {ctype_of(program, Load(n))} {name} = {text};")
                self.terms[Load(n)] = name
        self.varies = varying(program, lambda v: v not in self.terms)
        self.emitter.statements(self.w, self.terms, lambda k: not self.varies[k])

    def results(
        self, vector: int, along: int, element: str, anchor: str, whole: bool, guard: Callable[[str], str] | None
    ) -> None:
        """Runs the program on ``vector`` results that are neighbours along dimension ``along`` of the space.

        element is the C variable that counts them, anchor their sum; whole says that all of them always exist, so that wide
        accesses are possible; otherwise guard(element) is the condition under which one exists.
        """
        w, program, spec = self.w, self.spec.program, self.spec
        position = self.position

        def offset(strides: Strides, moving: bool) -> str:
            terms = list(zip(position, strides))
            if moving and vector > 1:
                terms.append((element, strides[along]))
            return linear(terms)

        def wide(operand: Operand) -> bool:
            if vector == 1 or not whole or operand.strides[along] != 1:
                return False
            width = min(16, vector * operand.dtype.itemsize)
            space = (spec.images, spec.groups, spec.filters, *spec.out)
            others = [s for d, s in enumerate(operand.strides) if d != along and space[d] > 1]
            return operand.alignment % width == 0 and all(s * operand.dtype.itemsize % width == 0 for s in others)

        vectors: dict[int, str] = {}
        for n, operand in enumerate(program.loads):
            if Load(n) not in self.terms and wide(operand):
                vectors[n] = self.names.unique(operand.name, "_v")
                w.line(
                    f"const auto {vectors[n]} = load<{vector}>({self.pointers.loads[n]} + {offset(operand.strides, False)});"
                )
        wide_stores: dict[int, str] = {}
        for n, store in enumerate(program.stores):
            if wide(store.operand):
                wide_stores[n] = self.names.unique(store.operand.name, "_v")
                w.line(f"Vector<{store.operand.dtype.ctype}, {vector}> {wide_stores[n]};")
        if vector > 1:
            w.line("#pragma unroll")
            w.open(f"for (int {element} = 0; {element} < {vector}; ++{element})")
            if not whole and guard is not None:
                w.line(f"if ({guard(element)}) continue;")
        terms = dict(self.terms)
        for n, operand in enumerate(program.loads):
            if Load(n) in terms:
                continue
            source = (
                f"{vectors[n]}[{element}]"
                if n in vectors
                else f"{self.pointers.loads[n]}[{offset(operand.strides, True)}]"
            )
            name = self.names.unique(operand.name, "_e")
            w.line(f"const {ctype_of(program, Load(n))} {name} = {converted(operand, source, program.real)};")
            terms[Load(n)] = name
        for n, strides in enumerate(program.indices):
            terms[Index(n)] = f"int32({offset(strides, True)})"
        terms[Anchor()] = self._anchor(anchor)
        self.emitter.statements(w, terms, lambda k: self.varies[k])
        for n, (store, pointer) in enumerate(zip(program.stores, self.pointers.stores)):
            text = self.emitter.stored(store, terms, lambda v: ctype_of(program, v, spec.result))
            target = (
                f"{wide_stores[n]}[{element}]"
                if n in wide_stores
                else f"{pointer}[{offset(store.operand.strides, True)}]"
            )
            w.line(f"{target} = {text};")
        if vector > 1:
            w.close()
        for n, name in wide_stores.items():
            store = program.stores[n]
            w.line(f"store({self.pointers.stores[n]} + {offset(store.operand.strides, False)}, {name});")

    def _anchor(self, text: str) -> str:
        accumulate, result = self.spec.accumulate, self.spec.result
        if accumulate == result:
            return text
        if accumulate.startswith("uint"):
            signed = accumulate.removeprefix("u")
            return f"{signed}({text})" if signed == result else f"convert<{result}>({signed}({text}))"
        return f"convert<{result}>({text})"

    def loaded(self, operand: Operand, text: str) -> str:
        """An element in the accumulator's type."""
        c = self.spec.accumulate
        if operand.dtype.ctype == c:
            return text
        return f"{c}({text})" if c.startswith("uint") else f"convert<{c}>({text})"


class _Planes(_Renderer):
    def describe(self) -> str:
        s = self.s
        return f"a block {s.rows * s.warps} x {s.cols * s.lanes} outputs, a thread {s.rows} x {s.cols}"

    def body(self) -> int:
        w, s, spec, t, c = self.w, self.s, self.spec, self.t, self.spec.accumulate
        planes, pitch = spec.taps[0], _pitch(spec, s)
        blocks = self.locate(spec.groups, s.rows * s.warps, s.cols * s.lanes)
        w.line(f"const int tx = threadIdx.x % {LANES}, ty = threadIdx.x / {LANES};")
        w.line()
        w.line(f"__shared__ __align__(16) {c} tile[{spec.in_channels}][{planes}][{self.tile_rows}][{pitch}];")
        w.line(f"__shared__ {c} weights[{spec.filters}][{spec.in_channels}][{planes}][{spec.taps[1]}][{spec.taps[2]}];")
        self._stage_weights()
        self._stage_tile(pitch)
        w.line("__syncthreads();")
        w.line()
        w.line(f"const {t} row = {linear([(self.at['row0'], 1), ('ty', s.rows)])};")
        w.line(f"const {t} col = {linear([(self.at['col0'], 1), ('tx', s.cols)])};")
        w.line(f"if (row >= {spec.out[1]} || col >= {spec.out[2]}) return;")
        w.line(f"{c} sum[{spec.filters}][{s.rows}][{s.cols}] = {{}};")
        self._slide()
        w.line()
        self.scalars()
        f, p = self.loop("f", spec.filters), self.loop("p", s.rows)
        down = "row" if p == "0" else "(row + p)"
        if spec.out[1] % s.rows:
            w.line(f"if ({down.strip('()')} >= {spec.out[1]}) break;")
        self.position = [self.at["image"], self.at["group"], f, self.at["depth"], down, "col"]
        self.results(
            s.cols,
            5,
            "q",
            f"sum[{f}][{p}][{'q' if s.cols > 1 else '0'}]",
            spec.out[2] % s.cols == 0,
            lambda q: f"col + {q} >= {spec.out[2]}",
        )
        self.end_loops()
        return blocks

    def _stage_weights(self) -> None:
        w, spec, s = self.w, self.spec, self.s
        sizes = (spec.filters, spec.in_channels, *spec.taps)
        count = prod(sizes)
        w.open(f"for (int at = threadIdx.x; at < {count}; at += {s.threads})")
        names = []
        for d, size in enumerate(sizes):
            names.append("0" if size == 1 else f"({coordinate('at', sizes, d)})")
        names = names[:2] + [self.reversed_tap(a, n) if n != "0" else n for a, n in enumerate(names[2:])]
        terms = [(self.at["group"], spec.w.strides[0]), *zip(names, spec.w.strides[1:])]
        source = self.loaded(spec.w, f"{self.weights}[{linear(terms)}]")
        w.line(f"(&weights[0][0][0][0][0])[at] = {source};")
        w.close()

    def _stage_tile(self, pitch: int) -> None:
        """Rows of the halo tile go to warps, their columns to lanes; outside the image is zero."""
        w, spec, s, t = self.w, self.spec, self.s, self.t
        planes = spec.taps[0]
        interleaved = spec.in_channels > 1 and spec.x.strides[2] == 1
        sizes = (planes, self.tile_rows) if interleaved else (spec.in_channels, planes, self.tile_rows)
        rows = prod(sizes)
        w.open(f"for (int line = ty; line < {rows}; line += {s.warps})")
        names = ["ic", "iz", "iy"] if not interleaved else ["iz", "iy"]
        for d, name in enumerate(names):
            if sizes[d] > 1:
                w.line(f"const int {name} = {coordinate('line', sizes, d)};")
        ic, iz, iy = ([] if not interleaved else ["ic"]) + [n if size > 1 else "0" for n, size in zip(names, sizes)]
        unsigned = "uint32" if t == "int32" else "uint64"
        inside = []
        in_d, in_h = "0", "in_h"
        if spec.sizes[0] > 1 or spec.taps[0] > 1 or spec.out[0] > 1:
            in_d = "in_d"
            w.line(
                f"const {t} in_d = {self.source(0, self.at['depth'], '0')}{f' + {iz} * {spec.dilation[0]}' if iz != '0' else ''};"
            )
            inside.append(f"{unsigned}(in_d) < {spec.sizes[0]}")
        w.line(f"const {t} in_h = {self.source(1, self.at['row0'], iy)};")
        inside.append(f"{unsigned}(in_h) < {spec.sizes[1]}")
        w.line(f"const bool inside = {' && '.join(inside)};")
        width = self.tile_cols * (spec.in_channels if interleaved else 1)
        w.line("#pragma unroll 4")
        if interleaved:
            w.open(f"for (int at = tx; at < {width}; at += {LANES})")
            w.line(f"const int ic = at % {spec.in_channels}, ix = at / {spec.in_channels};")
        else:
            w.open(f"for (int ix = tx; ix < {width}; ix += {LANES})")
        w.line(f"const {t} in_w = {self.source(2, self.at['col0'], 'ix')};")
        terms = list(zip((self.at["image"], self.at["group"], ic, in_d, in_h, "in_w"), spec.x.strides))
        value = self.loaded(spec.x, f"{self.x}[{linear(terms)}]")
        w.line(
            f"tile[{ic}][{iz}][{iy}][ix] = inside && {unsigned}(in_w) < {spec.sizes[2]} ? {value} : {spec.accumulate}(0);"
        )
        w.close()
        w.close()

    def _slide(self) -> None:
        """Every row of the tile under the patch is read once and used by all outputs it touches."""
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        rows = (s.rows - 1) * spec.stride[1] + (spec.taps[1] - 1) * spec.dilation[1] + 1
        reads = _row_reads(spec, s)
        sh, sw, dw = spec.stride[1], spec.stride[2], spec.dilation[2]
        vectors = s.cols * sw % PATCH_COLUMNS == 0
        ic, iz, iy = self.loop("ic", spec.in_channels), self.loop("iz", spec.taps[0]), self.loop("iy", rows)
        start = f"tile[{ic}][{iz}][{linear([('ty', s.rows * sh), (iy, 1)])}]"
        left = linear([("tx", s.cols * sw), ("ix", 1)])
        w.line(f"{c} line[{reads}];")
        w.line("#pragma unroll")
        if vectors:
            w.open(f"for (int ix = 0; ix < {reads}; ix += {PATCH_COLUMNS})")
            w.line(f"const auto vec = load_shared<{PATCH_COLUMNS}>(&{start}[{left}]);")
            w.line("#pragma unroll")
            w.line(f"for (int e = 0; e < {PATCH_COLUMNS}; ++e) line[ix + e] = vec[e];")
            w.close()
        else:
            w.line(f"for (int ix = 0; ix < {reads}; ++ix) line[ix] = {start}[{left}];")
        p = self.loop("p", s.rows)
        kr = self.tap_row(iy, p)
        f, ks, q = self.loop("f", spec.filters), self.loop("ks", spec.taps[2]), self.loop("q", s.cols)
        w.line(f"sum[{f}][{p}][{q}] += weights[{f}][{ic}][{iz}][{kr}][{ks}] * line[{linear([(q, sw), (ks, dw)])}];")
        self.end_loops()


class _Channels(_Renderer):
    def describe(self) -> str:
        s = self.s
        return (
            f"a block {s.rows} x {s.warps} outputs of {s.lanes * s.vector} channels, "
            f"a thread {s.rows} x 1 of {s.vector}"
        )

    def body(self) -> int:
        w, s, spec, t, c = self.w, self.s, self.spec, self.t, self.spec.accumulate
        channels = s.lanes * s.vector
        blocks = self.locate(-(-spec.groups // channels), s.rows, s.warps)
        w.line()
        storage = spec.x.dtype.ctype
        w.line(
            f"__shared__ __align__(16) {storage} tile[{spec.taps[0]}][{self.tile_rows}][{self.tile_cols}][{channels}];"
        )
        self._stage_tile(channels)
        w.line("__syncthreads();")
        w.line()
        w.line(f"const int lane = threadIdx.x % {s.lanes} * {s.vector}, tx = threadIdx.x / {s.lanes};")
        w.line(
            f"const {t} group = {linear([(self.at['channel0'], 1), ('lane', 1)])}, col = {linear([(self.at['col0'], 1), ('tx', 1)])};"
        )
        w.line(f"if (group >= {spec.groups} || col >= {spec.out[2]}) return;")
        self._weights()
        w.line(f"{c} sum[{s.rows}][{s.vector}] = {{}};")
        self._slide()
        w.line()
        self.scalars()
        p = self.loop("p", s.rows)
        down = linear([(self.at["row0"], 1), (p, 1)])
        if spec.out[1] % s.rows:
            w.line(f"if ({down} >= {spec.out[1]}) break;")
        down = f"({down})" if "+" in down else down
        self.position = [self.at["image"], "group", "0", self.at["depth"], down, "col"]
        self.results(s.vector, 1, "e", f"sum[{p}][{'e' if s.vector > 1 else '0'}]", True, None)
        self.end_loops()
        return blocks

    def _stage_tile(self, channels: int) -> None:
        """Runs of channels go to shared memory as they are stored, 16 bytes at a time where they are aligned."""
        w, spec, s, t = self.w, self.spec, self.s, self.t
        size = spec.x.dtype.itemsize
        vector = next(
            v
            for v in (16 // size, 8 // size, 4 // size, 2 // size, 1)
            if v >= 1
            and channels % v == 0
            and spec.groups % v == 0
            and spec.x.alignment % (v * size) == 0
            and all(
                st % v == 0
                for d, (st, many) in enumerate(zip(spec.x.strides, (spec.images, 1, 1, *spec.sizes)))
                if many > 1
            )
        )
        sizes = (spec.taps[0], self.tile_rows, self.tile_cols, channels // vector)
        w.line("#pragma unroll 4")
        w.open(f"for (int at = threadIdx.x; at < {prod(sizes)}; at += {s.threads})")
        names = ["iz", "iy", "ix", "strip"]
        for d, name in enumerate(names):
            if sizes[d] > 1:
                scale = f" * {vector}" if name == "strip" and vector > 1 else ""
                w.line(f"const int {name} = {coordinate('at', sizes, d)}{scale};")
        iz, iy, ix, strip = (n if size > 1 else "0" for n, size in zip(names, sizes))
        unsigned = "uint32" if t == "int32" else "uint64"
        bounds, in_d = [], "0"
        if spec.sizes[0] > 1 or spec.taps[0] > 1 or spec.out[0] > 1:
            in_d = "in_d"
            w.line(
                f"const {t} in_d = {linear([(self.at['depth'], spec.stride[0]), (iz, spec.dilation[0])], -spec.before[0])};"
            )
            bounds.append(f"{unsigned}(in_d) < {spec.sizes[0]}")
        w.line(f"const {t} in_h = {self.source(1, self.at['row0'], iy)}, in_w = {self.source(2, self.at['col0'], ix)};")
        bounds += [f"{unsigned}(in_h) < {spec.sizes[1]}", f"{unsigned}(in_w) < {spec.sizes[2]}"]
        if spec.groups % channels:
            bounds.append(f"{linear([(self.at['channel0'], 1), (strip, 1)])} < {spec.groups}")
        xs = spec.x.strides
        terms = [(self.at["image"], xs[0]), (self.at["channel0"], 1), (strip, 1)]
        terms += [(in_d, xs[3]), ("in_h", xs[4]), ("in_w", xs[5])]
        storage = spec.x.dtype.ctype
        w.line(f"Vector<{storage}, {vector}> value = {{}};")
        w.line(f"if ({' && '.join(bounds)}) value = load<{vector}>({self.x} + {linear(terms)});")
        w.line(f"store_shared(&tile[{iz}][{iy}][{ix}][{strip}], value);")
        w.close()

    def _weights(self) -> None:
        w, spec, s, c = self.w, self.spec, self.s, self.spec.accumulate
        w.line(f"{c} weights[{spec.taps[0]}][{spec.taps[1]}][{spec.taps[2]}][{s.vector}];")
        taps = [self.loop(name, count) for name, count in zip(("iz", "kr", "ks"), spec.taps)]
        e = self.loop("e", s.vector)
        terms = [("(group + e)" if e == "e" else "group", spec.w.strides[0])]
        terms += [(self.reversed_tap(a, n), st) for a, (n, st) in enumerate(zip(taps, spec.w.strides[3:]))]
        at = "".join(f"[{n}]" for n in (*taps, e))
        w.line(f"weights{at} = {self.loaded(spec.w, f'{self.weights}[{linear(terms)}]')};")
        self.end_loops()

    def _slide(self) -> None:
        """Rows of the tile pass by: each element is read once a tap column and used by all output rows it touches."""
        w, spec, s = self.w, self.spec, self.s
        rows = (s.rows - 1) * spec.stride[1] + (spec.taps[1] - 1) * spec.dilation[1] + 1
        iz, iy, ks = self.loop("iz", spec.taps[0]), self.loop("iy", rows), self.loop("ks", spec.taps[2])
        column = linear([("tx", spec.stride[2]), (ks, spec.dilation[2])])
        w.line(f"const auto vec = load_shared<{s.vector}>(&tile[{iz}][{iy}][{column}][lane]);")
        p = self.loop("p", s.rows)
        kr = self.tap_row(iy, p)
        e = self.loop("e", s.vector)
        w.line(f"sum[{p}][{e}] += weights[{iz}][{kr}][{ks}][{e}] * {self.loaded(spec.x, f'vec[{e}]')};")
        self.end_loops()
