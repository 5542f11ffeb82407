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

from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

from codegen.attention import backward_wgmma_schedule as wgmma
from codegen.attention.backward_scores import without_places
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma_block import Block, descriptor
from codegen.attention.wgmma_schedule import PANEL, ROWS, panels
from codegen.buffers import SWIZZLED, Buffer, Buffers
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.iteration import linear, packed
from codegen.kernel import parameter
from codegen.pipeline import GROUP, Meeting, Relay, await_products, products, results, use
from codegen.sizes import below
from codegen.spec import KernelSource, TensorMap
from codegen.target import Target
from codegen.tensor_map import refusal

#: Consumer warpgroups of a block.
GROUPS = 2
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

    @property
    def block(self) -> wgmma.AttentionBackwardWgmmaSchedule:
        """What a block has in common with those that compute the sums of keys alone."""
        return wgmma.AttentionBackwardWgmmaSchedule(GROUPS, self.cols, self.stages, apart=self.apart)


def buffers(spec: AttentionBackwardSpec, s: AttentionBackwardFusedSchedule) -> Buffers:
    """Returns what a block has in shared memory."""
    t, sums, note = spec.attention.q.dtype.ctype, 2 * panels(spec.attention.depth), "on their way to those of queries"
    return wgmma.buffers(
        spec,
        s.block,
        Buffer("gradients", t, (GROUPS, s.cols, ROWS), WRITERS, align=SWIZZLED, note="by scores, in turn"),
        Buffer("sums", "float", (sums, s.cols, FLOATS), WRITERS, align=SWIZZLED, note=note),
        Buffer("sums_empty", "Barrier", (), WRITERS),
        Buffer("number", "int"),
    )


def schedules(spec: AttentionBackwardSpec, target: Target) -> tuple[AttentionBackwardFusedSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    if not spec.fused:
        return ()
    wgmma.check(spec, target)
    a = spec.attention
    if spec.first is None or spec.second is None or spec.by_scores is not None or spec.sloped:
        raise Declined("there are other results than the sums of queries, keys and values")
    if max(a.depth, a.width) > 2 * PANEL:
        raise Declined(f"the sums of {max(a.depth, a.width)} elements do not fit the registers of a warpgroup")
    # Two places in the code ask which keys a tile of queries meets and which queries a tile of keys meets: they must
    # agree.
    if a.ranges or any(abs(b.row) > 1 or abs(b.key) > 1 for b in a.bounds):
        raise Declined("which tiles meet is not known from either side")
    preferred = [(64, 2), (96, 2), (32, 2)] if max(a.depth, a.width) <= PANEL else [(64, 2), (48, 2), (32, 2)]
    found = []
    for cols, stages in preferred:
        s = AttentionBackwardFusedSchedule(min(cols, -(-a.rows // 32) * 32), stages)
        few = wgmma.registers_held(spec, s.cols, apart=s.apart) <= HELD
        if few and buffers(spec, s).bytes <= target.arch.shared_bytes_per_block:
            _sums_map(spec, s.cols, 0)
            found.append(s)
    if not found:
        raise Declined("no tile fits the shared memory and registers of a block")
    return tuple(dict.fromkeys(found))


def _sums_map(spec: AttentionBackwardSpec, cols: int, argument: int) -> TensorMap:
    """Returns the map of the sums of queries.  Raises Declined if TMA cannot add to them."""
    op, a = spec.by_queries, spec.attention
    assert op is not None
    batch = [(n, 4 * step) for n, step in zip(a.batch, op.strides) if n > 1]
    sizes, strides = (a.depth, a.rows, *(n for n, _ in batch)), (4 * op.strides[-2], *(step for _, step in batch))
    made = TensorMap(argument, "float", sizes, strides, (FLOATS, cols, *(1 for _ in batch)), (1,) * len(sizes), 128)
    if (reason := refusal(made)) is not None:
        raise Declined(f"{op.name} cannot be stored by TMA: {reason}")
    return made


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardFusedSchedule) -> KernelSource:
    """Returns the CUDA C of a specification.  Raises Declined if this form does not suit it."""
    return _Fused(without_places(spec), schedule).render()


class _Fused(Block):
    """Writes the kernel of all gradients.

    sums     products of keys with gradients, on their way from the consumers to the writers.
    numbers  the barrier of the consumers and of the warp that brings the numbers of queries.
    queries  of the product with the keys that a warpgroup computes: all of a panel of elements, or half of them.
    """

    def __init__(self, spec: AttentionBackwardSpec, schedule: AttentionBackwardFusedSchedule) -> None:
        short = max(spec.attention.depth, spec.attention.width) <= PANEL
        super().__init__(spec, schedule.block, wgmma.FEWER if short else wgmma.REGISTERS[GROUPS])
        self.buffers = buffers(spec, schedule)
        assert spec.by_queries is not None
        assert spec.order is not None
        self.scores.whole_tiles = True
        unique, self.number = self.w.names.unique, len(self.w.passed)
        self.map, self.order = unique(spec.by_queries.name, "_map"), unique(spec.order.name)
        self.w.take(self.map, map_=_sums_map(spec, schedule.cols, self.number))
        self.w.take(parameter(spec.order, self.order, written=True))
        self.deep = self.held[0].buffer.shape[0]
        self.queries = schedule.cols if self.deep > 1 else schedule.cols // GROUPS
        self.sums = Relay(self.w, "sums", WRITERS, first=SUMS, fills=GROUPS * GROUP, waiting=32)
        self.numbers = Meeting(self.w, "numbers", GRADIENTS, numbers=32, consumer=GROUPS * GROUP)

    def render(self) -> KernelSource:
        w, a = self.w, self.a
        with self.begin(self.buffers):
            self.sums.init()
            w.line(f"shared.number = take_number({self.order});")
        self.scores.place("shared.number", 1)
        w.line()
        with w.block("if (group < 0)"):
            self.producer(nullcontext())
            self._bring_numbers()
            self._writers()
        with w.role("consumer", otherwise=True, groups=GROUPS):
            self._consumer()
        zeroed = [(self.number + 1, 4 * (1 + prod(a.batch) * -(-a.rows // self.s.cols)))]
        met = all(not b.loads and below(-1, b.start) and b.row + b.key == 0 for b in a.bounds)
        if not met or (not below(a.rows, a.keys + 1) and any(b.key > 0 for b in a.bounds)):
            # No block writes a tile of queries to which none adds.
            zeroed.append((self.number, 4 * prod(a.batch) * a.rows * a.depth))
        return self.source(self.work, tuple(zeroed))

    def _bring_numbers(self) -> None:
        """Writes the warp that brings a tile's numbers, once consumers have read those of the tile two before it."""
        w = self.w
        with w.role("numbers", "threadIdx.x / 32 == 1", otherwise=True), self.scores.met():
            with w.loop("for (int tile = first; tile < last; ++tile)"):
                self.bring_numbers("[tile % 2]")
                self.numbers.sync()
            self.numbers.sync(condition="first < last", note="those of the last one are no longer needed")

    # ---- the warps that add to the sums of queries

    def _writers(self) -> None:
        w, first = self.w, GROUP - 32 * WRITERS
        with w.role("writer", f"threadIdx.x >= {first}", otherwise=True):
            w.line(f"const int writer = (threadIdx.x - {first}) / 32;")
            w.line(f"Ring<{WRITERS}> sent;")
            with self.scores.met(), w.loop("for (int tile = first; tile < last; ++tile, ++sent)"):
                w.line("if (sent.index != writer) continue;")
                self.sums.wait("sent", at="writer")
                with w.block("if (threadIdx.x % 32 == 0)"):
                    self._turn()
                    self._add_sums()
                w.line("__syncwarp();")

    def _turn(self) -> None:
        """Writes the counter of blocks that have added to the tile, and the wait for those before this one."""
        w, s, a = self.w, self.s, self.a
        steps = packed((*a.batch, -(-a.rows // s.cols)))
        terms = [(f"b{d}", steps[d]) for d, n in enumerate(a.batch) if n > 1]
        w.line(f"int32* const turns = {self.order} + {linear([*terms, ('tile', 1)], 1)};")
        self.scores.keys = s.height
        begin, end = self.scores.keys_range(f"tile * {s.cols}", s.cols, whole=True)
        if self.scores.last_first:
            turn = f"{f'({end})' if '?' in end else end} - 1 - r0 / {s.height}"
        else:
            turn = linear([(f"r0 / {s.height}", 1), *([(f"({begin})", -1)] if begin != "0" else [])])
        w.line(f"const int turn = {turn};  // blocks of keys that the queries meet come before")
        w.line("turn_wait(turns, turn);")

    def _add_sums(self) -> None:
        w = self.w
        place = ", ".join([f"tile * {self.s.cols}", *(f"b{d}" for d, n in enumerate(self.a.batch) if n > 1)])
        operands = f"{self.map}, shared.sums[writer][i], i * {FLOATS}, {place}"
        with w.block(f"for (int i = 0; i < {2 * self.deep}; ++i)"), w.block("if (turn == 0)"):
            w.line(f"tma_store({operands});")
            w.otherwise()
            w.line(f"tma_store_add({operands});")
        w.line("tma_commit();")
        w.line("tma_wait_read<0>();")
        self.sums.release("sent", condition="", at="writer")
        w.line("tma_wait<0>();")
        w.line("turn_end(turns);")

    # ---- the consumers

    def _consumer(self) -> None:
        w = self.w
        self.begin_consumer()
        w.line("Ring<1> held;")
        w.line(f"Ring<{WRITERS}> sent;  // places of gradients and of their products with the keys")
        self.fragments(f"by_k[{self.queries // 2}]")
        self.rows.wait("held")
        with self.scores.met():
            self.scores.define()
            self.numbers.sync(condition="first < last")
            with w.loop("for (int tile = first; tile < last; ++tile, ++stage, ++sent)"):
                self._work_on_tile()
        use(w, *(r.sums for r in self.results))
        w.line(f"named_barrier_sync({GRADIENTS}, {GROUPS * GROUP});  // no keys are needed by the other warpgroup")
        self.store()

    def _work_on_tile(self) -> None:
        """Writes the work on a tile of queries."""
        w = self.w
        self.ring.wait()
        self.multiply("s", 0)
        self.multiply("d", 1)
        self.scores.draw("tile")
        results(w, "s", "the products of queries and keys are there")
        self.probabilities("[tile % 2]")
        self.add(self.by_p)
        results(w, "d", "those with the loss are there")
        self.gradients("[tile % 2]")
        self._share_gradients()
        self.add(self.by_s)
        self.numbers.sync(note="those of all keys are there, and the numbers of the next queries")
        self._multiply_keys()
        await_products(w)
        self.ring.release()
        use(w, "by_k")
        self.sums.acquire("sent")
        self._share_sums()
        self.sums.fill("sent")

    def _share_gradients(self) -> None:
        w = self.w
        w.line("auto& by_scores = shared.gradients[sent.index];")
        with w.unrolled(f"for (int j = 0; j < {self.s.cols // 16}; ++j)"):
            factor = "g_factor" if self.s.apart else "factor"
            w.line(f"store_words_turned<{ROWS}>(&by_scores[group][0][0], t / 32 * 16, j * 16, {factor}[j]);")
        w.line("fence_async_shared();")

    def _multiply_keys(self) -> None:
        """Writes the products of keys with a tile's gradients: rows are elements, columns are queries."""
        panel, query = ("group", "0") if self.deep > 1 else ("0", f"group * {self.queries}")
        a = descriptor(f"&shared.keys[held.index][{panel}][kk * 16][0]", self.s.height * 128)
        b = descriptor(f"&by_scores[kk / 4][{query}][kk % 4 * 16]")
        with products(self.w, "by_k", (self.rows, "held")):
            self.wgmma(self.s.height // 16, self.queries, f"by_k, {a},", f"{b}, kk > 0);")

    def _share_sums(self) -> None:
        box, first = ("group * 2 + t / 64", "0") if self.deep > 1 else ("t / 64", f"group * {self.queries}")
        place = f"(t / 32 * 16 + lane / 4) % {FLOATS}"
        self.w.line(f"attention::store_turned(&shared.sums[sent.index][{box}][{first}][0], {place}, by_k);")
        self.w.line("fence_async_shared();")
