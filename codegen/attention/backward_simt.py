"""Attention's gradients by single threads: every dtype, any strides, everywhere; float32 as it is.

A warp has some rows (queries or keys), of which each lane computes the gradients of one column of a tile, then some
elements of the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2, prod

from codegen.attention.backward_scores import BackwardScores, without_places
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.scores import guard, kernel_details, stored
from codegen.buffers import Buffer, Buffers
from codegen.declined import Declined
from codegen.expr import Operand, literal
from codegen.family import Schedule
from codegen.kernel import Kernel, converted, parameter
from codegen.spec import KernelSource
from codegen.target import Target

WARPS, LANES = 4, 32
#: Most bytes of shared memory of a block, and most elements of results of a thread.
MOST_SHARED, MOST_ELEMENTS = 96 << 10, 64


@dataclass(frozen=True)
class AttentionBackwardSimtSchedule(Schedule):
    """``rows`` of a warp; a block has four warps, a tile 32 columns."""

    rows: int

    @property
    def height(self) -> int:
        return WARPS * self.rows


def buffers(spec: AttentionBackwardSpec, s: AttentionBackwardSimtSchedule) -> Buffers:
    """Returns what a block has in shared memory."""
    real, deep, wide = spec.program.real, spec.attention.depth, spec.attention.width
    return Buffers(
        (
            Buffer("held_first", real, (s.height, deep)),
            Buffer("held_second", real, (s.height, wide)),
            Buffer("other_first", real, (LANES, deep), pad=1, note="a column is spread over all banks"),
            Buffer("other_second", real, (LANES, wide), pad=1),
        )
    )


def schedules(spec: AttentionBackwardSpec, target: Target | None = None) -> tuple[AttentionBackwardSimtSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined if a tile does not fit."""
    if spec.fused:
        return ()
    a = spec.attention
    each = -(-a.depth // LANES) * (spec.first is not None) + -(-a.width // LANES) * (spec.second is not None)
    found = [AttentionBackwardSimtSchedule(n) for n in (4, 2, 1) if n * each <= MOST_ELEMENTS]
    found = [s for s in found if buffers(spec, s).bytes <= MOST_SHARED]
    if not found:
        raise Declined(f"32 keys of {a.depth} and values of {a.width} elements do not fit shared memory")
    return tuple(found)


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardSimtSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(without_places(spec), schedule).render()


class _Renderer:
    def __init__(self, spec: AttentionBackwardSpec, schedule: AttentionBackwardSimtSchedule) -> None:
        self.spec, self.s, self.a = spec, schedule, spec.attention
        self.w = Kernel(spec.name)
        self.names = self.w.names
        q, k, v, loss, self.lse, self.row_dot = (self.names.unique(op.name) for op in spec.arguments)
        self.held, self.brought = ((q, loss), (k, v)) if spec.queries else ((k, v), (q, loss))
        self.scores = BackwardScores(self.w, spec, self.names, schedule.height, LANES)
        self.written = [self.names.unique(op.name) for op in spec.written]
        self.arguments = [q, k, v, loss, self.lse, self.row_dot]
        self.real = spec.program.real
        self.deep, self.wide = (-(-n // LANES) for n in (self.a.depth, self.a.width))

    def render(self) -> KernelSource:
        w, s, spec, a, real = self.w, self.s, self.spec, self.a, self.real
        program = a.program
        details = [
            *kernel_details(a),
            f"for {s.height} {spec.over} a block, {s.rows} a warp, in tiles of {LANES} of the others",
        ]
        w.parameters += [parameter(op, name) for op, name in zip(spec.arguments, self.arguments)]
        w.parameters += self.scores.parameters()
        w.parameters += [parameter(op, name, written=True) for op, name in zip(spec.written, self.written)]
        w.share(buffers(spec, s))
        w.line(f"const int t = threadIdx.x, lane = t % {LANES}, row = t / {LANES} * {s.rows};")
        w.line(f"const {real} unit = {literal(a.scale * log2(e), real)};  // of a score, to base 2")
        tiles = -(-spec.rows // s.height)
        w.line(f"const int r0 = blockIdx.x % {tiles} * {s.height};")
        self.scores.coordinates(f"(blockIdx.x / {tiles})", spec.batch)
        self.scores.scalars()
        self._fill("held_first", spec.held[0], self.held[0], "r0", s.height, spec.rows, a.depth)
        self._fill("held_second", spec.held[1], self.held[1], "r0", s.height, spec.rows, a.width)
        for name, there, each in (("by_s", spec.first, self.deep), ("by_p", spec.second, self.wide)):
            if there is not None:
                w.line(f"{real} {name}[{s.rows}][{each}] = {{}};")
        if spec.queries:
            w.line(f"{real} lse[{s.rows}], row_dot[{s.rows}];")
            with w.unrolled(f"for (int r = 0; r < {s.rows}; ++r)"):
                self._numbers("lse[r]", "row_dot[r]", "r0 + row + r")
        self.scores.intervals()
        head = f"b{len(a.batch) - 1}"
        with w.block(f"for (int {head} = 0; {head} < {spec.summed}; ++{head})", when=spec.summed > 1):
            self.scores.bound_numbers()
            self.scores.met()
            with w.block("for (int tile = first; tile < last; ++tile)"):
                w.line(f"const int c0 = tile * {LANES};")
                w.line("__syncthreads();  // the tile before has been used")
                self._fill("other_first", spec.brought[0], self.brought[0], "c0", LANES, spec.cols, a.depth)
                self._fill("other_second", spec.brought[1], self.brought[1], "c0", LANES, spec.cols, a.width)
                w.line("__syncthreads();")
                self._tile()
        self._results()
        return w.source(
            program,
            details,
            blocks=tiles * prod(spec.batch),
            threads=WARPS * LANES,
            barriers=True,
            arguments=range(len(w.parameters)),
        )

    def _numbers(self, lse: str, row_dot: str, query: str) -> None:
        """Writes the lse and row_dot of a query; one that does not exist has no probabilities."""
        w, spec, real = self.w, self.spec, self.real
        w.line(f"const {self.scores.t} x = {query};")
        unit = literal(log2(e), real)
        one = converted(spec.lse, f"{self.lse}[{self.scores.offset(spec.lse, 'x')}]", real)
        other = converted(spec.row_dot, f"{self.row_dot}[{self.scores.offset(spec.row_dot, 'x')}]", real)
        one = f"attention::lse({unit} * {one})" if spec.guarded else f"{unit} * {one}"
        if self.a.rows % (self.s.height if spec.queries else LANES):
            one = f"x < {self.a.rows} ? {one} : infinity<{real}>()"
            other = f"x < {self.a.rows} ? {other} : {real}(0)"
        w.line(f"{lse} = {one};")
        w.line(f"{row_dot} = {other};")

    def _fill(self, what: str, op: Operand, name: str, first: str, size: int, total: int, elements: int) -> None:
        w = self.w
        with w.block(f"for (int i = t; i < {size * elements}; i += {WARPS * LANES})"):
            w.line(f"const {self.scores.t} x = {first} + i / {elements}, y = i % {elements};")
            place = self.scores.offset(op, "x", "y")
            value = converted(op, f"{name}[{place}]", self.real)
            value = value if total % size == 0 else f"x < {total} ? {value} : {self.real}(0)"
            w.line(f"shared.{what}[i / {elements}][y] = {value};")

    def _tile(self) -> None:
        w, s, spec, a, real, scores = self.w, self.s, self.spec, self.a, self.real, self.scores
        if not spec.queries:
            w.line(f"{real} lse, row_dot;")
            with w.block(""):
                self._numbers("lse", "row_dot", "c0 + lane")
        for name, part, elements in (("s", "first", a.depth), ("d", "second", a.width)):
            w.line(f"{real} {name}[{s.rows}] = {{}};")
            with w.block(f"for (int i = 0; i < {elements}; ++i)"):
                held, other = f"shared.held_{part}[row + r][i]", f"shared.other_{part}[lane][i]"
                w.unrolled_line(f"for (int r = 0; r < {s.rows}; ++r) {name}[r] += {held} * {other};")
        with w.unrolled(f"for (int r = 0; r < {s.rows}; ++r)"):
            w.line(f"const {scores.t} m = r0 + row + r, n = c0 + lane;")
            scores.element("m", "n", "s[r]", inside=False, count=1)
            lse, row_dot = ("lse[r]", "row_dot[r]") if spec.queries else ("lse", "row_dot")
            w.line(f"s[r] = math::exp2(unit * score[0] - {lse});")
            if a.weight is not None:
                scores.weigh("m", "n", "d[r]", count=1)
                w.line(f"d[r] = s[r] * (weighted[0] - {row_dot});")
            else:
                w.line(f"d[r] = s[r] * (d[r] - {row_dot});")
            if spec.by_scores is not None:
                op = spec.by_scores
                place = f"{self.written[-1]}[{scores.offset(op, 'm', 'n')}]"
                w.line(f"{guard((a.rows, a.keys), (s.height, LANES))}{place} = {stored(op, 'd[r]', real)};")
            if spec.sloped:
                w.line("d[r] *= slope_of[0];")
            if a.weight is not None and spec.second is not None:
                with w.block(""):
                    scores.weigh("m", "n", "s[r]", count=1)
                    w.line("s[r] = weighted[0];")
        with w.block(f"for (int j = 0; j < {LANES}; ++j)"), w.unrolled(f"for (int r = 0; r < {s.rows}; ++r)"):
            for name, of, part, there, elements, each in (
                ("by_s", "d", "first", spec.first, a.depth, self.deep),
                ("by_p", "s", "second", spec.second, a.width, self.wide),
            ):
                if there is None:
                    continue
                w.line(f"const {real} {of}_j = __shfl_sync(0xffffffffu, {of}[r], j);")
                test = f"if (c * {LANES} + lane < {elements}) " if elements % LANES else ""
                other = f"shared.other_{part}[j][c * {LANES} + lane]"
                w.unrolled_line(f"for (int c = 0; c < {each}; ++c) {test}{name}[r][c] += {of}_j * {other};")

    def _results(self) -> None:
        w, s, spec, real, scores = self.w, self.s, self.spec, self.real, self.scores
        with w.unrolled(f"for (int r = 0; r < {s.rows}; ++r)"):
            w.line(f"const {scores.t} m = r0 + row + r;")
            if spec.rows % s.height:
                w.line(f"if (m >= {spec.rows}) break;")
            names = iter(self.written)
            for name, op, elements, each in (
                ("by_s", spec.first, self.a.depth, self.deep),
                ("by_p", spec.second, self.a.width, self.wide),
            ):
                if op is None:
                    continue
                value = f"{name}[r][c]"
                if name == "by_s" and spec.factor != 1:
                    value = f"{literal(spec.factor, real)} * {value}"
                with w.unrolled(f"for (int c = 0; c < {each}; ++c)"):
                    w.line(f"const {scores.t} n = c * {LANES} + lane;")
                    place = scores.offset(op, "m", "n")
                    test = f"if (n < {elements}) " if elements % LANES else ""
                    w.line(f"{test}{next(names)}[{place}] = {stored(op, value, real)};")
