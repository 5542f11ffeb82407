"""Attention by single threads: every dtype, any strides, everywhere; float32 as it is.

A warp has some queries, of which each lane computes the scores of one key of a tile, then some elements of the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2, prod

from codegen.attention.computed import Rows, RowsPrologue
from codegen.attention.scores import (
    Scores,
    all_arguments,
    approximated,
    argument_names,
    argument_parameters,
    kernel_details,
    merged,
    sink_value,
    stored,
)
from codegen.attention.spec import AttentionSpec, Pages
from codegen.buffers import Buffer, Buffers
from codegen.declined import Declined
from codegen.expr import Operand, literal
from codegen.family import Schedule
from codegen.iteration import linear
from codegen.kernel import Kernel, converted, parameter
from codegen.spec import KernelSource
from codegen.target import Target

WARPS, LANES = 4, 32
#: Most bytes of shared memory for a block's elements of queries, keys and values.
MOST_SHARED = 96 << 10


@dataclass(frozen=True)
class AttentionSimtSchedule(Schedule):
    """``queries`` of a warp; a block has four warps, a tile 32 keys."""

    queries: int

    @property
    def rows(self) -> int:
        return WARPS * self.queries


def buffers(spec: AttentionSpec, s: AttentionSimtSchedule) -> Buffers:
    """Returns what a block has in shared memory."""
    real = spec.program.real
    return Buffers(
        (
            Buffer("queries", real, (s.rows, spec.depth)),
            Buffer("keys", real, (LANES, spec.depth), pad=1, note="a column is spread over all banks"),
            Buffer("values", real, (LANES, spec.width)),
        )
    )


def schedules(spec: AttentionSpec, target: Target | None = None) -> tuple[AttentionSimtSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined if a tile does not fit."""
    found = [AttentionSimtSchedule(n) for n in (4, 2, 1) if n * -(-spec.width // LANES) <= 32]
    found = [s for s in found if buffers(spec, s).bytes <= MOST_SHARED]
    if not found:
        raise Declined(f"32 keys of {spec.depth} and values of {spec.width} elements do not fit shared memory")
    return tuple(found)


def render(spec: AttentionSpec, schedule: AttentionSimtSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return all_arguments(spec, _Renderer(merged(spec), schedule).render())


class _Renderer:
    def __init__(self, spec: AttentionSpec, schedule: AttentionSimtSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.w = Kernel(spec.name)
        self.names = self.w.names
        self.arguments = argument_names(spec, self.names)
        self.scores = Scores(self.w, spec, self.names, LANES)
        for epilogue in (self.scores.edge, self.scores.inner):
            epilogue.pointers.stores = ["score"]
        if self.scores.weight is not None:
            self.scores.weight.pointers.stores = ["weighted"]
        self.written = self.scores.written(self.names)
        self.real = spec.program.real
        self.each = -(-spec.width // LANES)

    def render(self) -> KernelSource:
        w, s, spec, real = self.w, self.s, self.spec, self.real
        program = approximated(spec)
        details = [*kernel_details(spec), f"{s.rows} queries a block, {s.queries} a warp, tiles of {LANES} keys"]
        w.parameters += argument_parameters(spec, self.arguments)
        w.parameters += self.scores.parameters()
        w.parameters += [parameter(op, name, written=True) for op, name in zip(spec.written, self.written)]
        w.share(buffers(spec, s))
        w.line(f"const int t = threadIdx.x, lane = t % {LANES}, row = t / {LANES} * {s.queries};")
        w.line(f"const {real} unit = {literal(spec.scale * log2(e), real)};  // of a score, to base 2")
        tiles = -(-spec.rows // s.rows)
        w.line(f"const int m0 = blockIdx.x % {tiles} * {s.rows};")
        self.scores.coordinates(f"(blockIdx.x / {tiles})")
        self.scores.bound_numbers()
        self.scores.scalars()
        self.scores.keys_met("m0", s.rows)
        self._fill("queries", spec.q, 0, "m0", s.rows, spec.rows, spec.depth)
        self._state()
        with w.block("for (int tile = first; tile < last; ++tile)"):
            w.line(f"const int n0 = tile * {LANES};")
            w.line("__syncthreads();  // the tile before has been used")
            pages = spec.pages or (None, None)
            self._fill("keys", spec.k, 1, "n0", LANES, spec.keys, spec.depth, pages[0])
            self._fill("values", spec.v, 2, "n0", LANES, spec.keys, spec.width, pages[1])
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

    def _fill(
        self,
        what: str,
        op: Operand,
        number: int,
        first: str,
        size: int,
        total: int,
        elements: int,
        pages: Pages | None = None,
    ) -> None:
        w, name = self.w, self.arguments[number]
        computed = self.scores.computed[number]
        if computed is not None:
            self._compute(computed, what, first, size, total)
            return
        with w.block(f"for (int i = t; i < {size * elements}; i += {WARPS * LANES})"):
            w.line(f"const {self.scores.t} r = {first} + i / {elements}, d = i % {elements};")
            table = self.arguments[number + 2] if pages is not None else ""
            place = linear([*self.scores.row_terms(op, pages, table, "r", total), ("d", op.strides[-1])])
            value = converted(op, f"{name}[{place}]", self.real)
            value = value if total % size == 0 else f"r < {total} ? {value} : {self.real}(0)"
            w.line(f"shared.{what}[i / {elements}][d] = {value};")

    def _compute(self, computed: RowsPrologue, what: str, first: str, size: int, total: int) -> None:
        """Writes a tile of rows that are computed; values that do not exist become 0."""
        w, count = self.w, computed.vector

        def store(name: str) -> None:
            value = f"{name}[e]"
            if what == "values" and total % size:
                value = f"{first} + r < {total} ? {value} : {self.real}(0)"
            w.unrolled_line(f"for (int e = 0; e < {count}; ++e) shared.{what}[r][d + e] = {value};")

        elements = self.spec.width if what == "values" else self.spec.depth
        scores = self.scores
        last = total - 1 if total % size else None
        tile = Rows(first, last, size, elements, "t", WARPS * LANES, scores.batch, scores.t, self.real)
        computed.fill(tile, store)

    def _state(self) -> None:
        w, s, real, spec = self.w, self.s, self.real, self.spec
        w.line(f"{real} o[{s.queries}][{self.each}] = {{}}, largest[{s.queries}], total[{s.queries}];")
        start, have = f"-infinity<{real}>()", "0"
        if spec.sink is not None:
            start = sink_value(w, spec, self.arguments[-1], self.scores.batch, real)
            have = "lane == 0"
        with w.unrolled(f"for (int r = 0; r < {s.queries}; ++r)"):
            w.line(f"largest[r] = {start};")
            w.line(f"total[r] = {have};  // the lane's share")

    def _tile(self) -> None:
        w, s, spec, real, scores = self.w, self.s, self.spec, self.real, self.scores
        w.line(f"{real} s[{s.queries}] = {{}};")
        with w.block(f"for (int d = 0; d < {spec.depth}; ++d)"):
            w.unrolled_line(
                f"for (int r = 0; r < {s.queries}; ++r) s[r] += shared.queries[row + r][d] * shared.keys[lane][d];"
            )
        with w.unrolled(f"for (int r = 0; r < {s.queries}; ++r)"):
            m = "m0 + row + r"
            if spec.rows % s.rows:
                m = f"min({m}, {spec.rows - 1})"
            w.line(f"const {scores.t} m = {m}, n = n0 + lane;")
            w.line(f"{real} score[1] = {{-infinity<{real}>()}};")
            with w.block(f"if (n < {spec.keys})", when=scores.ragged):
                scores.edge.results([*scores.batch, "m", "n"], ["s[r]"])
            w.line(f"const {real} most = max(largest[r], reduce::lanes<reduce::Max, {LANES}>(score[0]));")
            w.line(f"const {real} shift = most == -infinity<{real}>() ? {real}(0) : unit * most;")
            w.line(f"const {real} rescale = math::exp2(unit * largest[r] - shift);")
            w.line("largest[r] = most;")
            w.line("s[r] = math::exp2(unit * score[0] - shift);")
            w.line("total[r] = total[r] * rescale + s[r];")
            if scores.weight is not None:
                w.line(f"{real} weighted[1] = {{}};")
                with w.block(f"if (n < {spec.keys})", when=scores.ragged):
                    scores.weight.results([*scores.batch, "m", "n"], ["s[r]"])
                w.line("s[r] = weighted[0];")
            w.unrolled_line(f"for (int c = 0; c < {self.each}; ++c) o[r][c] *= rescale;")
        with w.block(f"for (int j = 0; j < {LANES}; ++j)"), w.unrolled(f"for (int r = 0; r < {s.queries}; ++r)"):
            w.line(f"const {real} weight = __shfl_sync(0xffffffffu, s[r], j);")
            with w.unrolled(f"for (int c = 0; c < {self.each}; ++c)"):
                test = f"if (c * {LANES} + lane < {spec.width}) " if spec.width % LANES else ""
                w.line(f"{test}o[r][c] += weight * shared.values[j][c * {LANES} + lane];")

    def _store(self) -> None:
        """Writes the store of an element of a result, if it exists."""
        w, spec, scores = self.w, self.spec, self.scores
        test = f"if (n < {spec.width}) " if spec.width % LANES else ""
        if scores.epilogue is None:
            op = spec.out
            place = scores.offset(op, "m", "n")
            w.line(f"{test}{self.written[0]}[{place}] = {stored(op, 'o[r][c] * inverse', self.real)};")
            return
        with w.block(test.rstrip(), when=bool(test)):
            scores.epilogue.results([*scores.batch, "m", "n"], ["o[r][c] * inverse"])

    def _results(self) -> None:
        w, s, spec, real, scores = self.w, self.s, self.spec, self.real, self.scores
        with w.unrolled(f"for (int r = 0; r < {s.queries}; ++r)"):
            w.line(f"const {scores.t} m = m0 + row + r;")
            if spec.rows % s.rows:
                w.line(f"if (m >= {spec.rows}) break;")
            w.line(f"const {real} sum = reduce::lanes<reduce::Add, {LANES}>(total[r]);")
            if spec.zero:
                w.line(f"const {real} inverse = sum == 0 ? {real}(0) : 1 / sum;")
            else:
                w.line(f"const {real} inverse = 1 / sum;")
            with w.unrolled(f"for (int c = 0; c < {self.each}; ++c)"):
                w.line(f"const {scores.t} n = c * {LANES} + lane;")
                if spec.zero:
                    w.line("if (sum == 0) o[r][c] = 0;  // no key is met, whatever the values are")
                self._store()
            if spec.stats is not None:
                place = scores.offset(spec.stats, "m")
                value = f"{literal(spec.scale, real)} * largest[r] + math::log(sum)"
                text = f"(sum == 0 ? -infinity<{real}>() : {value})"
                w.line(f"if (lane == 0) {self.written[-1]}[{place}] = {stored(spec.stats, text, real)};")
