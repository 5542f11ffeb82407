"""Attention by the tensor cores of a warp (mma.sync, sm_80 and newer), as in FlashAttention-2 (Dao, 2023).

A warp has 16 queries.  Tiles of keys and values are copied to shared memory (cp.async) while the tile before is
multiplied; rows there are padded by 16 bytes, so that eight of them begin in different banks.  The probabilities stay
in registers: as the first product leaves them, they are the fragments of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from codegen.attention.computed import Rows, RowsPrologue
from codegen.attention.fragments import ScoreFragments, check_types
from codegen.attention.scores import (
    all_arguments,
    approximated,
    argument_names,
    argument_parameters,
    kernel_details,
    merged,
)
from codegen.attention.spec import AttentionSpec, Pages
from codegen.buffers import VECTORS, Buffer, Buffers
from codegen.declined import Declined
from codegen.expr import Operand
from codegen.family import Schedule
from codegen.iteration import linear
from codegen.kernel import Kernel, parameter
from codegen.naming import Writer
from codegen.spec import KernelSource
from codegen.target import Target

WARP_ROWS, PAD = 16, 8  # queries of a warp, elements behind each row
STAGES = 2
VECTOR = 8  # elements of 16 bytes
#: Registers of a thread that scores, probabilities and results may take.
HELD = 200
CHAINS = 2  # of maxima and sums
PRODUCER_WARPS = 7  # warps that compute keys or values
#: Share of the L2 cache that may hold the keys and values which blocks running at the same time share.
SHARED_IN_L2 = 4 / 15


@dataclass(frozen=True)
class AttentionMmaSchedule(Schedule):
    """``warps`` of a block, of 16 queries each; ``keys`` of a tile, a multiple of 16; ``heads``, batches worked on
    together.

    producer_warps  further warps, which bring the tiles of keys and values while the others multiply; 0: all do both.
    """

    warps: int
    keys: int
    heads: int = 1
    producer_warps: int = 0

    @property
    def rows(self) -> int:
        return WARP_ROWS * self.warps


def _padded(elements: int) -> int:
    """Returns the number of elements of a padded row."""
    return -(-elements // 16) * 16


def buffers(spec: AttentionSpec, s: AttentionMmaSchedule, element: str = "float16") -> Buffers:
    """Returns what a block has in shared memory, of elements of 16 bits."""
    deep, wide = _padded(spec.depth), _padded(spec.width)
    return Buffers(
        (
            Buffer("queries", element, (s.rows, deep), pad=PAD, align=VECTORS),
            Buffer("keys", element, (s.keys, deep), STAGES, pad=PAD, align=VECTORS),
            Buffer("values", element, (s.keys, wide), STAGES, pad=PAD, align=VECTORS),
        )
    )


def schedules(spec: AttentionSpec, target: Target) -> tuple[AttentionMmaSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch.name} has no asynchronous copies")
    check_types(spec, small=True)
    if not all((prod(spec.batch), spec.rows, spec.keys, spec.depth, spec.width)):
        raise Declined("there is nothing to multiply")
    tall = max(spec.depth, spec.width)
    preferred = [(4, 64), (8, 64), (4, 32), (8, 32), (4, 16)] if tall <= 128 else [(4, 32), (8, 32), (4, 16)]
    if spec.rows <= 16:
        preferred = [(1, 64), (1, 32), (1, 16), *preferred]
    elif spec.rows <= 32:
        preferred = [(2, 32), (2, 64), (2, 16), *preferred]
    producer_warps = 0
    if any(spec.computed[1:]):  # nothing is in flight while keys or values are computed: other warps multiply meanwhile
        warps = next((n for n in (1, 2, 4) if WARP_ROWS * n >= spec.rows), 8)
        preferred, producer_warps = [(warps, 64), (warps, 32), (warps, 16), (4, 16)], min(PRODUCER_WARPS, 12 - warps)
    each = max(1, spec.keys * (spec.depth + spec.width) * 2)
    heads = max(1, min(prod(spec.batch), target.l2_share(SHARED_IN_L2) // each))
    found = []
    for warps, keys in preferred:
        s = AttentionMmaSchedule(warps, min(keys, _padded(spec.keys)), heads, producer_warps)
        held = s.keys // 2 + s.keys // 4 + _padded(spec.width) // 2
        if held <= HELD and buffers(spec, s).bytes <= target.arch.shared_bytes_per_block:
            found.append(s)
    if not found:
        raise Declined(f"the sums of {tall} elements do not fit the registers of a warp")
    return tuple(dict.fromkeys(found))


def render(spec: AttentionSpec, schedule: AttentionMmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return all_arguments(spec, _Renderer(merged(spec), schedule).render())


class _Renderer:
    def __init__(self, spec: AttentionSpec, schedule: AttentionMmaSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.w = Kernel(spec.name)
        self.names = self.w.names
        self.arguments = argument_names(spec, self.names)
        top = linear([("m0", 1), ("warp", WARP_ROWS if schedule.warps > 1 else 0)])
        self.scores = ScoreFragments(self.w, spec, self.names, schedule.keys, top, WARP_ROWS, schedule.rows)
        self.written = self.scores.written(self.names)
        self.element = self.scores.element
        self.deep, self.wide = _padded(spec.depth), _padded(spec.width)
        self.tiles, self.batches = -(-spec.rows // schedule.rows), prod(spec.batch)
        self.threads = 32 * (schedule.warps + schedule.producer_warps)
        #: the number of a thread that brings keys and values, and the number of such threads
        first, bringing = (
            (32 * schedule.warps, 32 * schedule.producer_warps) if schedule.producer_warps else (0, self.threads)
        )
        self.bringing = f"t - {first}" if first else "t", bringing

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        program = approximated(spec)
        details = [
            *kernel_details(spec),
            f"{s.rows} queries a block, {WARP_ROWS} a warp, tiles of {s.keys} keys in {STAGES} stages (cp.async)",
        ]
        w.parameters += argument_parameters(spec, self.arguments)
        w.parameters += self.scores.parameters()
        w.parameters += [parameter(op, name, written=True) for op, name in zip(spec.written, self.written)]
        t = self.element
        w.share(buffers(spec, s, t))
        w.line("const int t = threadIdx.x, warp = t / 32, lane = t % 32;")
        first_row = linear([("warp", WARP_ROWS), ("lane / 4", 1)])
        w.line(f"const int row = {first_row};  // of a thread's first result in the tile")
        w.line(f"const Tile at = tile_at<{self.batches}, {self.tiles}, {min(s.heads, self.batches)}>(blockIdx.x);")
        self.scores.place("at.row", "at.col")
        self.scores.unit()
        self.scores.scalars()
        self.scores.state(self.arguments[-1] if spec.sink is not None else "", self.wide)
        w.line(f"float s[{s.keys // 2}], rescale[2];")
        w.line(f"uint32 probability[{s.keys // 16}][4];")
        self.scores.define()
        with w.block("const auto fill = [&](int tile, int stage)", "};"):
            w.line(f"const int n0 = tile * {s.keys};")
            pages = spec.pages or (None, None)
            keys = "keys[stage]", spec.k, 1, "n0", s.keys, spec.keys, spec.depth, self.deep, pages[0]
            values = "values[stage]", spec.v, 2, "n0", s.keys, spec.keys, spec.width, self.wide, pages[1]
            for tensor in (keys, values) if spec.computed[1] is None else (values, keys):  # copies first
                self._fill(*tensor)
        self._fill("queries", spec.q, 0, "m0", s.rows, spec.rows, spec.depth, self.deep)
        tests = [f"warp >= {s.warps}"] if s.producer_warps else []
        tests += ["first < last"] if spec.some_meet_none else []
        condition = f"if ({' && '.join(tests)}) " if tests else ""
        w.line(f"{condition}fill(last - 1, 0);")
        w.line("copy_async_commit();")
        w.line("int stage = 0;")
        if s.producer_warps:
            w.line("copy_async_wait<0>();")
        with w.block("for (int tile = last - 1; tile >= first; --tile, stage ^= 1)"):
            if s.producer_warps:
                w.line("__syncthreads();  // this tile is there, that before has been multiplied")
                with w.block(f"if (warp >= {s.warps})"):
                    w.line("if (tile > first) fill(tile - 1, stage ^ 1);")
                    w.line("copy_async_commit();")
                    w.line("copy_async_wait<0>();")
                    w.line("continue;  // others multiply")
            else:
                w.line("if (tile > first) fill(tile - 1, stage ^ 1);")
                w.line("copy_async_commit();")
                w.line("copy_async_wait<1>();  // this tile is there, the next one is on its way")
                w.line("__syncthreads();")
            multiply(w, t, "s", "queries", "keys", self.deep, s.keys)
            self.scores.make("tile")
            # With many keys the errors of rounding even out in the sum; with few, the divisor is the sum of the rounded
            # exponentials, which are what is multiplied.  Statistics are of the unrounded exponentials.
            few = spec.keys <= s.keys and spec.stats is None
            self.scores.softmax(CHAINS, self.element if few else "")
            w.line("attention::scale(o, rescale);")
            w.line(f"attention::round_to_fragments<{self.element}>(s, probability);")
            add_products(w, t, "o", "probability", "values", s.keys, self.wide)
            if not s.producer_warps:
                w.line("__syncthreads();  // the tile has been used")
        if s.producer_warps:
            w.line(f"if (warp >= {s.warps}) return;")
        self.scores.finish(self.written[-1] if spec.stats is not None else "")
        self.scores.store(self.written[0], self.wide)
        return w.source(
            program,
            details,
            blocks=self.tiles * self.batches,
            threads=self.threads,
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
        padded: int,
        pages: Pages | None = None,
    ) -> None:
        """Writes the copies of a tile's rows of the argument of this number; what does not exist becomes 0."""
        w, t, name = self.w, self.scores.t, self.arguments[number]
        computed = self.scores.computed[number]
        if computed is not None:
            self._compute(computed, number, what, first, size, total, padded)
            return
        whole = total % size == 0
        each = copied_together(op, (*self.spec.batch, total), elements)
        if pages is not None and pages.step % VECTOR:
            each = 1
        pieces = padded // each
        thread, threads = self.bringing if number else ("t", self.threads)
        with w.block(f"for (int i = {thread}; i < {size * pieces}; i += {threads})"):
            times = f" * {each}" if each > 1 else ""
            w.line(f"const int r = i / {pieces}, d = i % {pieces}{times};")
            tests = [] if whole else [f"{first} + r < {total}"]
            tests += [f"d < {elements}"] if elements != padded else []
            exists = " && ".join(tests)
            table = self.arguments[number + 2] if pages is not None else ""
            place = linear(
                [*self.scores.row_terms(op, pages, table, f"{t}({first} + r)", total), ("d", op.strides[-1])]
            )
            to = f"shared.{what}[r][d]"
            if op.dtype.ctype != self.element:
                self._converted(op, name, place, to, each, exists)
            else:
                copy(w, op, name, place, to, each, exists)

    def _compute(
        self, computed: RowsPrologue, number: int, what: str, first: str, size: int, total: int, padded: int
    ) -> None:
        """Writes a tile of rows that are computed; values that do not exist become 0."""
        w, scores = self.w, self.scores

        def store(name: str) -> None:
            value = name
            if number == 2 and total % size:
                value = f"kept({name}, {first} + r < {total})"
            w.line(f"store_shared(&shared.{what}[r][d], {value});")

        last = total - 1 if total % size else None
        thread = self.bringing if number else ("t", self.threads)
        tile = Rows(first, last, size, padded, *thread, scores.batch, scores.t, self.element)
        computed.fill(tile, store)

    def _converted(self, op: Operand, name: str, place: str, to: str, each: int, exists: str) -> None:
        """Writes a piece of a row in the type in which it is multiplied."""
        w, t = self.w, self.element
        w.line(f"Vector<{t}, {each}> v = {{}};")
        with w.block(f"if ({exists})", when=bool(exists)):
            w.line(f"const auto x = load<{each}>({name} + {place});")
            w.unrolled_line(f"for (int e = 0; e < {each}; ++e) v[e] = convert<{t}>(x[e]);")
        w.line(f"store_shared(&{to}, v);")


def multiply(w: Writer, t: str, sums: str, held: str, brought: str, depth: int, cols: int) -> None:
    """Writes the products of a warp's rows of the tile ``held`` with the tile ``brought``; ``t`` is their C type."""
    w.unrolled_line(f"for (int i = 0; i < {cols // 2}; ++i) {sums}[i] = 0.0f;")
    with w.unrolled(f"for (int kk = 0; kk < {depth}; kk += 16)"):
        w.line("uint32 a[4];")
        w.line(f"load_matrices(a, &shared.{held}[warp * {WARP_ROWS} + lane % 16][kk + lane / 16 * 8]);")
        with w.unrolled(f"for (int j = 0; j < {cols}; j += 16)"):
            place = "[j + lane / 16 * 8 + lane % 8][kk + lane / 8 % 2 * 8]"
            w.line("uint32 b[2][2];")
            w.line(f"load_matrices(b, &shared.{brought}[stage]{place});")
            w.line(f"mma<{t}, {t}>(attention::part({sums}, j / 2), a, b[0]);")
            w.line(f"mma<{t}, {t}>(attention::part({sums}, j / 2 + 4), a, b[1]);")


def add_products(w: Writer, t: str, sums: str, factor: str, brought: str, cols: int, width: int) -> None:
    """Writes the products of a tile of operands A, which are in registers, with the tile ``brought``."""
    with w.unrolled(f"for (int kk = 0; kk < {cols // 16}; ++kk)", f"for (int j = 0; j < {width}; j += 16)"):
        w.line("uint32 b[2][2];")
        w.line(f"load_matrices_transposed(b, &shared.{brought}[stage][kk * 16 + lane % 16][j + lane / 16 * 8]);")
        w.line(f"mma<{t}, {t}>(attention::part({sums}, j / 2), {factor}[kk], b[0]);")
        w.line(f"mma<{t}, {t}>(attention::part({sums}, j / 2 + 4), {factor}[kk], b[1]);")


def copied_together(op: Operand, sizes: Sequence[int], elements: int) -> int:
    """Returns how many neighbours in an operand's rows are copied at once; ``sizes`` are those of batch and rows."""
    aligned = op.strides[-1] == 1 and op.alignment % (VECTOR * op.dtype.itemsize) == 0 and elements % VECTOR == 0
    aligned = aligned and not any(step % VECTOR for n, step in zip(sizes, op.strides) if n > 1)
    return VECTOR if aligned else 1


def copy(w: Writer, op: Operand, name: str, place: str, to: str, each: int, exists: str) -> None:
    """Writes the copy of ``each`` neighbours as they are, zeros where the C condition ``exists`` does not hold."""
    if each == 1:
        source = f"{name}[{place}]"
        w.line(f"{to} = {f'{exists} ? {source} : {op.dtype.ctype}{{}}' if exists else source};")
    elif exists:
        w.line(f"const bool exists = {exists};")
        w.line(f"copy_async<16>(&{to}, {name} + (exists ? {place} : 0), exists ? 16 : 0);")
    else:
        w.line(f"copy_async<16>(&{to}, {name} + {place});")
