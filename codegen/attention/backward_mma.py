"""Attention's gradients by the tensor cores of a warp (mma.sync, sm_80 and newer).

A warp has 16 rows, queries or keys, of a tile that the block keeps in shared memory; the other side is copied there in
tiles (cp.async) while the tile before is multiplied.  Probabilities and gradients stay in registers: as the first
products leave them, they are the operands A of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.attention.backward_fragments import BackwardFragments, random_registers
from codegen.attention.backward_scores import without_places
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.fragments import check_types
from codegen.attention.mma import PAD, STAGES, WARP_ROWS, add_products, copied_together, copy, multiply
from codegen.attention.scores import kernel_details
from codegen.attention.wgmma_schedule import columns as padded
from codegen.buffers import VECTORS, Buffer, Buffers
from codegen.declined import Declined
from codegen.expr import Operand
from codegen.family import Schedule
from codegen.iteration import linear
from codegen.kernel import Kernel, parameter
from codegen.spec import KernelSource
from codegen.target import Target

#: Registers of a thread that scores, gradients, operands and sums may take.
HELD = 208
#: Share of the L2 cache that may hold the tiles which blocks running at the same time share.
SHARED_IN_L2 = 4 / 15


@dataclass(frozen=True)
class AttentionBackwardMmaSchedule(Schedule):
    """``warps`` of a block, of 16 rows each; ``cols`` of a tile, a multiple of 16; ``heads``, batches worked on
    together.
    """

    warps: int
    cols: int
    heads: int = 1

    @property
    def height(self) -> int:
        return WARP_ROWS * self.warps


def buffers(spec: AttentionBackwardSpec, s: AttentionBackwardMmaSchedule, element: str = "float16") -> Buffers:
    """Returns what a block has in shared memory, of elements of 16 bits."""
    depth, width = padded(spec.attention.depth), padded(spec.attention.width)
    held, brought = (("queries", "losses"), ("keys", "values"))[:: 1 if spec.queries else -1]
    rows = [Buffer(name, element, (s.height, n), pad=PAD, align=VECTORS) for name, n in zip(held, (depth, width))]
    rows += [
        Buffer(name, element, (s.cols, n), STAGES, pad=PAD, align=VECTORS) for name, n in zip(brought, (depth, width))
    ]
    numbers = () if spec.queries else ("lse", "row_dot")
    return Buffers((*rows, *(Buffer(name, "float", (s.cols,), STAGES, align=VECTORS) for name in numbers)))


def _registers(spec: AttentionBackwardSpec, cols: int) -> int:
    a = spec.attention
    first, second = spec.first is not None, spec.second is not None
    sums = padded(a.depth) // 2 * first + padded(a.width) // 2 * second
    return sums + cols // 2 * (2 + spec.sloped) + cols // 4 * (first + second) + random_registers(a, cols)


def schedules(spec: AttentionBackwardSpec, target: Target) -> tuple[AttentionBackwardMmaSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    if spec.fused:
        return ()
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch.name} has no asynchronous copies")
    a = spec.attention
    check_types(a)
    if spec.loss.dtype.name != a.q.dtype.name:
        raise Declined(f"tensor cores multiply {spec.loss.name} in {a.q.dtype.name}")
    if spec.empty:
        raise Declined("there is nothing to multiply")
    preferred = [(4, 64), (8, 64), (4, 32), (8, 32), (4, 16), (2, 16)]
    if not spec.queries:
        preferred = [(4, 32), (8, 32), (4, 16), (8, 64), (2, 16)]
    if spec.rows <= 2 * WARP_ROWS:
        preferred = [(2, 32), (2, 16), *preferred]
    shares = prod(n for n, step in zip(a.batch, a.k.strides) if step == 0) if spec.queries else 1
    each = spec.cols * (a.depth + a.width) * 2
    heads = max(1, min(prod(spec.batch), target.l2_share(SHARED_IN_L2) // max(each, 1)) * shares)
    found = []
    for warps, cols in preferred:
        s = AttentionBackwardMmaSchedule(warps, min(cols, padded(spec.cols)), heads)
        if _registers(spec, s.cols) <= HELD and buffers(spec, s).bytes <= target.arch.shared_bytes_per_block:
            found.append(s)
    if not found:
        raise Declined(f"the sums of {max(a.depth, a.width)} elements do not fit the registers of a warp")
    return tuple(dict.fromkeys(found))


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardMmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(without_places(spec), schedule).render()


@dataclass(frozen=True)
class _Rows:
    """What tiles are copied from: an operand of ``total`` rows of ``elements`` elements, which are padded to
    ``padded``.
    """

    operand: Operand
    name: str
    total: int
    elements: int
    padded: int


class _Renderer:
    def __init__(self, spec: AttentionBackwardSpec, schedule: AttentionBackwardMmaSchedule) -> None:
        self.spec, self.s, self.a = spec, schedule, spec.attention
        a = self.a
        self.w = Kernel(spec.name)
        self.names = self.w.names
        self.arguments = [self.names.unique(op.name) for op in spec.arguments]
        self.lse, self.row_dot = self.arguments[4:]
        top = linear([("r0", 1), ("warp", WARP_ROWS)])
        self.scores = BackwardFragments(self.w, spec, self.names, schedule.height, schedule.cols, top, WARP_ROWS)
        self.written = [self.names.unique(op.name) for op in spec.written]
        self.deep, self.wide = padded(a.depth), padded(a.width)
        q, k, v, loss = (
            (what, _Rows(op, name, total, elements, padded(elements)))
            for what, op, name, (total, elements) in zip(
                ("queries", "keys", "values", "losses"),
                spec.arguments,
                self.arguments,
                ((a.rows, a.depth), (a.keys, a.depth), (a.keys, a.width), (a.rows, a.width)),
            )
        )
        self.held, self.brought = ((q, loss), (k, v)) if spec.queries else ((k, v), (q, loss))
        self.element = a.q.dtype.ctype
        self.with_loss = spec.first is not None or spec.by_scores is not None
        self.tiles, self.batches = -(-spec.rows // schedule.height), prod(spec.batch)
        self.threads = 32 * schedule.warps

    def render(self) -> KernelSource:
        w, s, spec, a = self.w, self.s, self.spec, self.a
        program = a.program
        details = [
            *kernel_details(a),
            f"for {s.height} {spec.over} a block, {WARP_ROWS} a warp, tiles of {s.cols} of the others in "
            f"{STAGES} stages (cp.async)",
        ]
        w.parameters += [parameter(op, name) for op, name in zip(spec.arguments, self.arguments)]
        w.parameters += self.scores.parameters()
        w.parameters += [parameter(op, name, written=True) for op, name in zip(spec.written, self.written)]
        w.share(buffers(spec, s, self.element))
        w.line("const int t = threadIdx.x, warp = t / 32, lane = t % 32;")
        first_row = linear([("warp", WARP_ROWS), ("lane / 4", 1)])
        w.line(f"const int row = {first_row};  // of a thread's first result in the tile")
        w.line(f"const Tile at = tile_at<{self.batches}, {self.tiles}, {min(s.heads, self.batches)}>(blockIdx.x);")
        # The last queries of a causal mask meet the most keys: they begin first.
        growing = spec.queries and any(b.key < 0 and b.row > 0 for b in a.bounds)
        w.line(f"const int r0 = {f'({self.tiles - 1} - at.col)' if growing else 'at.col'} * {s.height};")
        self.scores.coordinates("at.row", spec.batch)
        self.scores.unit()
        self.scores.scalars()
        self._state()
        for what, rows in self.held:
            self._copy(rows, what, "r0", s.height)
        self.scores.intervals()
        head = f"b{len(a.batch) - 1}"
        with w.block(f"for ({self.scores.t} {head} = 0; {head} < {spec.summed}; ++{head})", when=spec.summed > 1):
            self._loop()
        names = iter(self.written)
        for sums, op, elements, width, factor in (
            ("by_s", spec.first, a.depth, self.deep, spec.factor),
            ("by_p", spec.second, a.width, self.wide, 1.0),
        ):
            if op is not None:
                self.scores.store(sums, op, next(names), elements, width, factor)
        return w.source(
            program,
            details,
            blocks=self.tiles * self.batches,
            threads=self.threads,
            barriers=True,
            arguments=range(len(w.parameters)),
        )

    def _copy(self, rows: _Rows, what: str, first: str, size: int) -> None:
        """Writes the copies of a tile's rows; what does not exist becomes 0."""
        w, op, t = self.w, rows.operand, self.scores.t
        each = copied_together(op, (*self.a.batch, rows.total), rows.elements)
        pieces = rows.padded // each
        with w.block(f"for (int i = t; i < {size * pieces}; i += {self.threads})"):
            w.line(f"const int r = i / {pieces}, x = i % {pieces}{f' * {each}' if each > 1 else ''};")
            tests = [f"{first} + r < {rows.total}"] if rows.total % size else []
            tests += [f"x < {rows.elements}"] if rows.elements != rows.padded else []
            exists = " && ".join(tests)
            terms = [*zip(self.scores.batch, op.strides), (f"{t}({first} + r)", op.strides[-2]), ("x", op.strides[-1])]
            to, place = f"shared.{what}[r][x]", linear(terms)
            copy(w, op, rows.name, place, to, each, exists)

    def _state(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        half = s.cols // 2
        for sums, op, width in (("by_s", spec.first, self.deep), ("by_p", spec.second, self.wide)):
            if op is not None:
                w.line(f"float {sums}[{width // 2}] = {{}};")
        w.line(f"float s[{half}]{f', d[{half}]' if self.with_loss else ''}{f', slope[{half}]' if spec.sloped else ''};")
        w.line(f"uint32 factor[{s.cols // 16}][4];")
        self.scores.random_state()
        if spec.queries:
            self.scores.row_numbers(self.lse, self.row_dot)

    def _loop(self) -> None:
        """Writes the loop over the tiles of one head."""
        w, s, spec = self.w, self.s, self.spec
        self.scores.bound_numbers()
        self.scores.met()
        self.scores.define()
        with w.block("const auto fill = [&](int tile, int stage)", "};"):
            w.line(f"const int c0 = tile * {s.cols};")
            for what, rows in self.brought:
                self._copy(rows, f"{what}[stage]", "c0", s.cols)
            if not spec.queries:
                with w.block(f"for (int i = t; i < {s.cols}; i += {self.threads})"):
                    w.line(f"const {self.scores.t} x = c0 + i;")
                    exists = f"x < {spec.cols}" if spec.cols % s.cols else ""
                    w.line(f"shared.lse[stage][i] = {self.scores.lse_of(self.lse, 'x', exists)};")
                    if self.with_loss:
                        w.line(f"shared.row_dot[stage][i] = {self.scores.row_dot_of(self.row_dot, 'x', exists)};")
        w.line("if (first < last) fill(first, 0);")
        w.line("copy_async_commit();")
        w.line("int stage = 0;")
        with w.block("for (int tile = first; tile < last; ++tile, stage ^= 1)"):
            w.line("if (tile + 1 < last) fill(tile + 1, stage ^ 1);")
            w.line("copy_async_commit();")
            w.line("copy_async_wait<1>();  // this tile is there, the next one is on its way")
            w.line("__syncthreads();")
            self.scores.draw("tile")
            self._multiply("s", 0)
            self.scores.probabilities("tile", "&shared.lse[stage][0]")
            if spec.second is not None:
                self._sum("by_p", 1)
            if self.with_loss:
                self._multiply("d", 1)
                by_scores = self.written[-1] if spec.by_scores is not None else ""
                self.scores.gradients("tile", "&shared.row_dot[stage][0]", by_scores, "factor")
            if spec.first is not None:
                self._sum("by_s", 0)
            w.line("__syncthreads();  // the tile has been used")

    def _multiply(self, result: str, which: int) -> None:
        """Writes the products of the warp's rows with a tile in shared memory."""
        (held, rows), (other, _) = self.held[which], self.brought[which]
        multiply(self.w, self.element, result, held, other, rows.padded, self.s.cols)

    def _sum(self, sums: str, which: int) -> None:
        """Writes the products of a tile of operands A with a tile in shared memory."""
        other, rows = self.brought[which]
        add_products(self.w, self.element, sums, "factor", other, self.s.cols, rows.padded)
