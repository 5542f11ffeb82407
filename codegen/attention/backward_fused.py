"""All of attention's gradients by one kernel on Hopper: a block keeps keys, and adds to the sums of queries in memory.

Two kernels, one for every query and one for every key, compute the products of queries with keys and of the loss with
values twice.  Here they are computed once, as the kernel for every key does.  The gradients of a tile's scores go
through shared memory to their product with the keys, which TMA adds to the sums in memory.  Blocks add to a tile of
queries in turn, so that the same inputs give the same bits.  Each block takes a number as it begins, and waits for
blocks with smaller numbers only.  (Shah et al., "FlashAttention-3", 2024, section B.1; turns as in its deterministic
mode.)

Where later queries meet more keys, the blocks of the last keys begin first.  Each goes through the queries from the
first one that meets its keys: when it comes to a tile, the block whose turn is before its own is some tiles ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from codegen.attention.backward_scores import without_places
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma import Renderer
from codegen.attention.backward_wgmma_schedule import AttentionBackwardWgmmaSchedule, check, registers_held
from codegen.attention.wgmma_schedule import GROUP, PANEL, ROWS, columns, panels
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.iteration import linear
from codegen.kernel import parameter
from codegen.spec import KernelSource, TensorMap
from codegen.target import Target
from codegen.tensor_map import refusal

#: Consumer warpgroups of a block; registers of a thread of the producer and of a consumer, and the same with short
#: sums.
GROUPS, REGISTERS, FEWER = 2, (24, 240), (40, 232)
#: Registers of a consumer's thread that scores, gradients, operands and sums may take.
HELD = 224
#: Warps that add to the sums of queries, taking tiles by turns: while one waits, the others have their turns.
WRITERS = 2
#: Named barriers: a tile's gradients are in shared memory; so are their products with the keys (one for each writer).
GRADIENTS, SUMS = 4, 5
#: Floats of a row of 128 bytes.
FLOATS = 32


@dataclass(frozen=True)
class AttentionBackwardFusedSchedule(Schedule):
    """A tile of 128 keys a block.

    cols    queries of a tile in the ring, a multiple of 16.
    stages  of the ring of tiles, two or more.
    apart   whether the operands A of the two sums have registers of their own; else the second sum waits for the first.
    """

    cols: int
    stages: int
    apart: bool = True


def _shared_bytes(spec: AttentionBackwardSpec, s: AttentionBackwardFusedSchedule) -> int:
    deep, wide = panels(spec.attention.depth), panels(spec.attention.width)
    brought = 2 * PANEL * (deep + wide) * (GROUPS * ROWS + s.stages * s.cols)
    gradients, sums = WRITERS * GROUPS * s.cols * 2 * ROWS, WRITERS * 4 * PANEL * deep * s.cols
    return brought + gradients + sums + 16 * s.cols + 16 * (s.stages + 3) + 128


def schedules(spec: AttentionBackwardSpec, target: Target) -> tuple[AttentionBackwardFusedSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    if not spec.fused:
        return ()
    check(spec, target)
    a = spec.attention
    if spec.first is None or spec.second is None or spec.by_scores is not None or spec.sloped:
        raise Declined("there are other results than the sums of queries, keys and values")
    if max(a.depth, a.width) > 2 * PANEL:
        raise Declined(f"the sums of {max(a.depth, a.width)} elements do not fit the registers of a warpgroup")
    # Two places in the code ask which keys a tile of queries meets and which queries a tile of keys meets: they must
    # agree.
    if a.ranges or any(abs(b.row) > 1 or abs(b.key) > 1 for b in a.bounds):
        raise Declined("which tiles meet is not known from either side")
    preferred = [(96, 2), (64, 2), (32, 2)] if max(a.depth, a.width) <= PANEL else [(64, 2), (48, 2), (32, 2)]
    found = []
    for cols, stages in preferred:
        s = AttentionBackwardFusedSchedule(min(cols, -(-a.rows // 32) * 32), stages)
        if (
            registers_held(spec, s.cols, apart=s.apart) <= HELD
            and _shared_bytes(spec, s) <= target.arch.shared_bytes_per_block
        ):
            _sums_map(spec, s.cols, 0)
            found.append(s)
    if not found:
        raise Declined("no tile fits the shared memory and registers of a block")
    return tuple(dict.fromkeys(found))


def _sums_map(spec: AttentionBackwardSpec, cols: int, argument: int) -> TensorMap:
    """Returns the map of the sums of queries.  Raises Declined if TMA cannot add to them."""
    op, a = spec.by_queries, spec.attention
    assert op is not None
    sizes, strides = [a.depth, a.rows], [4 * op.strides[-2]]
    for n, step in zip(a.batch, op.strides):
        if n > 1:
            sizes.append(n)
            strides.append(4 * step)
    boxed = FLOATS, cols, *(1 for _ in sizes[2:])
    made = TensorMap(argument, "float", tuple(sizes), tuple(strides), boxed, (1,) * len(sizes), 128)
    if (reason := refusal(made)) is not None:
        raise Declined(f"{op.name} cannot be stored by TMA: {reason}")
    return made


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardFusedSchedule) -> KernelSource:
    """Returns the CUDA C of a specification.  Raises Declined if this form does not suit it."""
    return _Fused(without_places(spec), schedule).render()


class _Fused(Renderer):
    def __init__(self, spec: AttentionBackwardSpec, schedule: AttentionBackwardFusedSchedule) -> None:
        cols, stages, apart = schedule.cols, schedule.stages, schedule.apart
        super().__init__(spec, AttentionBackwardWgmmaSchedule(GROUPS, cols, stages, apart=apart))
        assert spec.by_queries is not None
        assert spec.order is not None
        self.schedule, self.each = schedule, False
        self.registers = FEWER if self.deep == self.wide == 1 else REGISTERS
        self.scores.whole_tiles = True
        self.sums = self.names.unique(spec.by_queries.name, "_map")
        self.order = self.names.unique(spec.order.name)
        #: number of the argument that holds the sums of queries; the next argument is their order
        self.number = len(spec.arguments) + len(self.a.loads) + len(self.results)
        #: columns of the product with the keys that a warpgroup computes: all queries for a panel of elements, or half
        self.part = cols if self.deep > 1 else cols // GROUPS
        #: whether later queries meet more keys
        self.growing = any(b.row > 0 and b.key < 0 for b in self.a.bounds)

    def render(self) -> KernelSource:
        source, a, spec = super().render(), self.a, self.spec
        assert source.parameters is not None
        counters = 4 * (1 + prod(a.batch) * -(-a.rows // self.s.cols))
        zeroed = [(self.number + 1, counters)]
        met = all(not b.loads and b.start >= 0 and b.row + b.key == 0 for b in a.bounds)
        if not met or (a.rows > a.keys and any(b.key > 0 for b in a.bounds)):
            # No block writes a tile of queries to which none adds.
            zeroed.append((self.number, 4 * prod(a.batch) * a.rows * a.depth))
        return replace(
            source,
            grid=(self.tiles * self.batches, 1, 1),
            dynamic_shared_bytes=_shared_bytes(spec, self.schedule),
            parameters=(*source.parameters, _sums_map(spec, self.s.cols, self.number), self.number + 1),
            zeroed=tuple(zeroed),
        )

    def _shapes(self) -> list[int]:
        return [*super()._shapes(), self.part]

    def _more_parameters(self) -> list[str]:
        assert self.spec.order is not None
        order = parameter(self.spec.order, self.order, written=True)
        return [f"const __grid_constant__ TensorMap {self.sums}", order]

    # ---- the block

    def _more_shared(self) -> None:
        w, s = self.w, self.s
        w.line(f"alignas(1024) {self.element} gradients[{WRITERS}][{GROUPS}][{s.cols}][{ROWS}];  // by scores, in turn")
        sums = f"sums[{WRITERS}][{2 * self.deep}][{s.cols}][{FLOATS}]"
        w.line(f"alignas(1024) float {sums};  // on their way to those of queries")
        w.line(f"Barrier sums_empty[{WRITERS}];")
        w.line("int number;")

    def _more_barriers(self) -> None:
        self.w.line(f"for (int i = 0; i < {WRITERS}; ++i) barrier_init(shared.sums_empty[i], 1);")
        self.w.line(f"shared.number = take_number({self.order});")

    def _shared(self) -> None:
        super()._shared()
        w, s = self.w, self.s
        w.line(f"const Tile at = tile_at<{self.batches}, {self.tiles}, 1>(shared.number);")
        w.line(f"const int r0 = {f'({self.tiles - 1} - at.col)' if self.growing else 'at.col'} * {s.height};")
        self.scores.coordinates("at.row", self.spec.batch)
        w.line()

    def _work(self) -> None:
        """Writes no loop: a block has one tile."""

    def _end_work(self) -> None:
        pass

    # ---- the warp that brings the numbers of queries

    def _meet(self, condition: str, comment: str = "") -> None:
        """Writes the barrier between the consumers and the warp that brings the numbers of queries."""
        before = f"if ({condition}) " if condition else ""
        self.w.line(f"{before}named_barrier_sync({GRADIENTS}, {GROUPS * GROUP + 32});{comment}")

    def _numbers(self) -> None:
        """Writes the warp that brings a tile's numbers, once consumers have read those of the tile two before it."""
        w = self.w
        w.otherwise("else if (threadIdx.x / 32 == 1)")
        self._tiles()
        with w.block("for (int tile = first; tile < last; ++tile)"):
            self._bring("[tile % 2]")
            self._meet("")
        self._meet("first < last", "  // those of the last one are no longer needed")
        self._end_tiles()

    # ---- the warps that add to the sums of queries

    def _more_warps(self) -> None:
        w, s = self.w, self.s
        w.otherwise(f"else if (threadIdx.x >= {GROUP - 32 * WRITERS})")
        w.line(f"const int writer = (threadIdx.x - {GROUP - 32 * WRITERS}) / 32;")
        w.line(f"Ring<{WRITERS}> sent;")
        self._tiles()
        w.open("for (int tile = first; tile < last; ++tile, ++sent)")
        w.line("if (sent.index != writer) continue;")
        w.line(f"named_barrier_sync({SUMS} + writer, {GROUPS * GROUP + 32});")
        w.open("if (threadIdx.x % 32 == 0)")
        self._turn()
        w.line("turn_wait(turns, turn);")
        place = ", ".join([f"tile * {s.cols}", *(f"b{d}" for d, n in enumerate(self.a.batch) if n > 1)])
        w.open(f"for (int i = 0; i < {2 * self.deep}; ++i)")
        w.open("if (turn == 0)")
        w.line(f"tma_store({self.sums}, shared.sums[writer][i], i * {FLOATS}, {place});")
        w.otherwise()
        w.line(f"tma_store_add({self.sums}, shared.sums[writer][i], i * {FLOATS}, {place});")
        w.close()
        w.close()
        w.line("tma_commit();")
        w.line("tma_wait_read<0>();")
        w.line("barrier_arrive(shared.sums_empty[writer]);")
        w.line("tma_wait<0>();")
        w.line("turn_end(turns);")
        w.close()
        w.line("__syncwarp();")
        w.close()
        self._end_tiles()

    def _turn(self) -> None:
        """Writes the counter of blocks that have added to the tile, and how many blocks come before this one."""
        w, s, a = self.w, self.s, self.a
        terms: list[tuple[str, int]] = []
        step = -(-a.rows // s.cols)
        for d, n in reversed([*enumerate(a.batch)]):
            if n > 1:
                terms.insert(0, (f"b{d}", step))
            step *= n
        w.line(f"int32* const turns = {self.order} + {linear([*terms, ('tile', 1)], 1)};")
        self.scores.keys = s.height
        begin, end = self.scores.keys_range(f"tile * {s.cols}", s.cols, whole=True)
        if self.growing:
            turn = f"{f'({end})' if '?' in end else end} - 1 - r0 / {s.height}"
        else:
            turn = linear([(f"r0 / {s.height}", 1), *([(f"({begin})", -1)] if begin != "0" else [])])
        w.line(f"const int turn = {turn};  // blocks of keys that the queries meet come before")

    # ---- the consumers

    def _consumer(self) -> None:
        w, s = self.w, self.s
        half = s.cols // 2
        gradients = "g_factor" if s.apart else "factor"
        w.line(f"registers_increase<{self.registers[1]}>();")
        w.line(f"const int t = threadIdx.x % {GROUP}, lane = t % 32;")
        w.line(f"const int row = group * {ROWS} + t / 32 * 16 + lane / 4;  // of a thread's first result in the tile")
        self.scores.unit()
        self.scores.scalars()
        w.line(f"Ring<{s.stages}> stage;")
        w.line("Ring<1> held;")
        w.line(f"Ring<{WRITERS}> sent;  // places of gradients and of their products with the keys")
        for r in self.results:
            w.line(f"float {r.sums}[{columns(r.elements) // 2}] = {{}};")
        w.line(f"float s[{half}], d[{half}], by_k[{self.part // 2}];")
        w.line(f"uint32 {', '.join(f'{x}[{s.cols // 16}][4]' for x in dict.fromkeys(('factor', gradients)))};")
        self.scores.random_state()
        w.line("barrier_wait(shared.held_full[held.index], held.parity);")
        self._tiles()
        self.scores.define()
        self._meet("first < last")
        with w.block("for (int tile = first; tile < last; ++tile, ++stage, ++sent)"):
            w.line("barrier_wait(shared.full[stage.index], stage.parity);")
            self._multiply("s", 0)
            self._multiply("d", 1)
            self.scores.draw("tile")
            w.line("wgmma_wait<1>();  // the products of queries and keys are there")
            w.line("wgmma_hold(s);")
            self.scores.probabilities("tile", "&shared.numbers[tile % 2][0][0]")
            self._sum("by_p", "factor", 1)
            w.line("wgmma_wait<1>();  // those with the loss are there")
            w.line("wgmma_hold(d);")
            ready = "" if s.apart else "wgmma_wait<0>();  // the operands are no longer needed"
            self.scores.gradients("tile", "&shared.numbers[tile % 2][1][0]", "", gradients, ready)
            w.line("auto& by_scores = shared.gradients[sent.index];")
            with w.unrolled(f"for (int j = 0; j < {s.cols // 16}; ++j)"):
                w.line(f"store_words_turned<{ROWS}>(&by_scores[group][0][0], t / 32 * 16, j * 16, {gradients}[j]);")
            w.line("fence_async_shared();")
            self._sum("by_s", gradients, 0)
            self._meet("", "  // those of all keys are there, and the numbers of the next queries")
            self._by_keys()
            w.line("wgmma_wait<0>();")
            w.line("if (t == 0) barrier_arrive(shared.empty[stage.index]);")
            w.line("wgmma_hold(by_k);")
            w.line("barrier_wait(shared.sums_empty[sent.index], sent.parity ^ 1);")
            box, first = ("group * 2 + t / 64", "0") if self.deep > 1 else ("t / 64", f"group * {self.part}")
            place = f"(t / 32 * 16 + lane / 4) % {FLOATS}"
            w.line(f"attention::store_turned(&shared.sums[sent.index][{box}][{first}][0], {place}, by_k);")
            w.line("fence_async_shared();")
            w.line(f"named_barrier_arrive({SUMS} + sent.index, {GROUPS * GROUP + 32});")
        self._end_tiles()
        for r in self.results:
            w.line(f"wgmma_hold({r.sums});")
        w.line(f"named_barrier_sync({GRADIENTS}, {GROUPS * GROUP});  // no keys are needed by the other warpgroup")
        self._store()

    def _by_keys(self) -> None:
        """Writes the products of keys with a tile's gradients: rows are elements, columns are queries."""
        w, s = self.w, self.s
        panel, query = ("group", "0") if self.deep > 1 else ("0", f"group * {self.part}")
        keys = f"&shared.keys[held.index][{panel}][kk * 16][0]"
        w.line("wgmma_fence();")
        with w.unrolled(f"for (int kk = 0; kk < {s.height // 16}; ++kk)"):
            w.line(f"wgmma<{self.element}, {self.element}, {self.part}, 1>(")
            w.line(f"    by_k, matrix_descriptor<128>({keys}, {s.height * 128}, 1024),")
            w.line(f"    matrix_descriptor<128>(&by_scores[kk / 4][{query}][kk % 4 * 16], 16, 1024), kk > 0);")
        w.line("wgmma_commit();")
