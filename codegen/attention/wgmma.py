"""Attention on Hopper: both products by warpgroups (wgmma), of tiles that TMA brings.

The pipeline is that of FlashAttention-3 (Shah et al., 2024).  One thread fills two rings of stages, of keys and of
values.  Each consumer, a warpgroup, has 64 queries.  It gives two products at a time to the tensor cores, that of its
queries with the next tile of keys and that of the probabilities of a tile, which lie in registers, with its values.
Then it computes the exponentials of the next tile, while the tensor cores work for the other consumers: they
ping-pong.  Blocks are persistent: behind the last product of a tile of queries, a block starts the first product of its
next tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codegen.attention.scores import merged
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_block import Block
from codegen.attention.wgmma_producer import produce
from codegen.attention.wgmma_results import await_queries, define_queries, free_results, store_results
from codegen.attention.wgmma_schedule import PANEL, AttentionWgmmaSchedule
from codegen.attention.wgmma_walk import Intervals, Lists, Spans
from codegen.iteration import linear
from codegen.pipeline import GROUP, await_products, products
from codegen.sizes import most
from codegen.spec import KernelSource


def render(spec: AttentionSpec, schedule: AttentionWgmmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    b = Block(merged(spec), schedule)
    walk = (Lists if b.scores.listed else Spans if b.scores.spanned else Intervals)(b)
    consumer = (_NarrowConsumer if b.narrow else _Consumer)(b, walk)
    b.begin()
    with b.w.role("producer", "group < 0"):
        produce(b, walk)
    with b.w.role("consumer", otherwise=True, groups=schedule.groups):
        consumer.consume()
    return b.source()


class _Consumer:
    """Writes what a consumer does: products, exponentials, and the release of what has been multiplied."""

    #: where products with values are added up, and arguments of wgmma
    sums, options, behind, adding = "o", ", 1", 2048, "true"

    def __init__(self, b: Block, walk: Intervals) -> None:
        self.b, self.w, self.s, self.scores, self.walk = b, b.w, b.s, b.scores, walk
        self.keys, self.values = b.keys, b.values
        self.sink = b.arguments[-1] if b.spec.sink is not None else ""

    def consume(self) -> None:
        w, s = self.w, self.s
        w.line(f"registers_increase<{s.registers(self.b.spec)[1]}>();")
        w.line(f"const int t = threadIdx.x % {GROUP}, lane = t % 32;")
        row = linear([(self.b.part, 1), ("t / 32 * 16", 1), ("lane / 4", 1)])
        w.line(f"const int row = {row};  // of a thread's first result in the tile")
        w.line(f"Ring<{s.stages}> stage;")
        w.line(f"Ring<{s.ahead}> query;")
        self.scores.unit()
        self.scores.scalars()
        if (prologue := self.scores.computed[0]) is not None:
            define_queries(self.b, prologue)
        if s.pingpong:
            w.line(f"if (group == {s.groups - 1}) named_barrier_arrive(1, {2 * GROUP});  // consumer 0 begins")
        (self._joined if self.b.joined else self._apart)()
        if self.b.out_map:
            w.line("if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it")

    def _apart(self) -> None:
        """Writes the work on tiles of queries one after the other."""
        w, latest = self.w, self.walk.latest
        with self.walk.tiles():
            self.scores.state(self.sink, self.b.width)
            await_queries(self.b, "query", "work")
            with self.walk.met():
                self._declare()
                self.scores.define()
                self.walk.await_first()
                with self._turn():
                    self._multiply_keys("query")
                self._tiles()
                self.values.wait(latest)
                self._multiply_values(latest)
                await_products(w)
                self.values.release(latest)
                self._add()
            store_results(self.b, self.walk)
            w.line("++query;")
            w.moved("query", "other")

    def _joined(self) -> None:
        """Writes the work on tiles of queries, of which each begins while the one before ends."""
        w = self.w
        self._declare()
        self.walk.look("attention::Span span", "query")
        await_queries(self.b, "query", "blockIdx.x")
        self.keys.wait()
        with self._turn():
            self._multiply_keys("query")
        with self.walk.tiles():
            self.scores.state(self.sink, self.b.width)
            self.scores.define()
            self._tiles()
            self.values.wait()
            self._multiply_values("stage")
            self._begin_next()
            self.values.release("previous")
            self._add()
            store_results(self.b, self.walk)
            w.line("query = next;")
            w.moved("query", "other")
            w.moved("next", "query")
        await_products(w, note="nothing is in flight, but the compiler cannot know")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Writes what consumers that ping-pong start one after the other."""
        w, groups = self.w, self.s.groups
        if self.s.pingpong:
            w.line(f"named_barrier_sync(1 + group, {2 * GROUP});  // this consumer's turn")
        yield
        if self.s.pingpong:
            other = "2 - group" if groups == 2 else f"1 + (group + 1) % {groups}"
            w.line(f"named_barrier_arrive({other}, {2 * GROUP});")

    def _begin_next(self) -> None:
        """Writes the start of the first product of the next tile of queries, behind the last one of this tile."""
        w = self.w
        w.line(f"const Ring<{self.s.stages}> previous = stage;")
        w.moved("stage", "previous")
        w.line("++stage;")
        w.line(f"Ring<{self.s.ahead}> next = query;")
        w.line("++next;")
        following = self.walk.look("const attention::Span following", "next")
        with w.branch(f"{following} < {self.b.work}"):
            await_queries(self.b, "next", following)
            self.keys.wait()
            with self._turn():
                self._multiply_keys("next")
            await_products(w, 1, "the results are there")
            w.alternative()
            await_products(w)

    def _tiles(self) -> None:
        """Writes the products with all keys, of which the first have begun, and with all values but the last."""
        w, s, scores = self.w, self.s, self.scores
        if not self.b.queries and most(self.b.work) > s.blocks:
            w.line(f"prefetch_queries({self.walk.following});")
        await_products(w)
        self.keys.release()
        w.reads("s")
        scores.make(self.walk.begin)
        scores.softmax(s.chains)
        free_results(self.b, self.walk)
        self._round(first=True)
        # Where consumers do not ping-pong and multiply 8-bit floats, it was faster to look for maxima while the
        # products with values go on.
        apart = self.b.narrow and not s.pingpong
        with self.walk.further():
            with self._turn():
                self._multiply_keys("query")
                self.values.wait("previous")
                self._multiply_values("previous")
            await_products(w, 1, "the scores are there")
            self.keys.release()
            w.reads("s")
            scores.make("tile")
            if apart:
                scores.largest(s.chains)
            # The other consumers' products run meanwhile; what follows may be done in any order, such as rounding while
            # the units for exponentials are busy, but only once nothing reads the probabilities of the tile before.
            await_products(w)
            self.values.release("previous")
            self._add()
            (scores.exponentials if apart else scores.softmax)(s.chains)
            self._round()

    def _declare(self) -> None:
        """Declares the scores of a tile and, rounded, its probabilities."""
        self.w.line(f"float s[{self.s.keys // 2}], rescale[2];")
        self.w.line(f"uint32 probability[{self.s.keys // self.b.step}][4];")

    def _multiply_keys(self, query: str) -> None:
        """Writes the start of the products of a tile of queries with the keys of ``stage``."""
        b, w, s = self.b, self.w, self.b.s
        steps = -(-b.spec.depth // b.step)
        with w.block(""):
            place = f"shared.queries[{query}.index][0][{b.part}]"
            w.line(f"const uint64 queries = matrix_descriptor<128>({place}, 16, 1024);")
            w.line("const uint64 keys = matrix_descriptor<128>(shared.keys[stage.index][0][0], 16, 1024);")
            reads = [(b.keys, "stage"), *([(b.queries, query)] if b.queries else [])]
            with products(w, "s", *reads), w.unrolled(f"for (int kk = 0; kk < {steps}; ++kk)"):
                w.line(f"wgmma<{b.element}, {b.element}, {s.keys}>(")
                if steps > 4:
                    w.line(f"    s, matrix_behind(queries, kk / 4 * {s.rows * 128} + kk % 4 * 32),")
                    w.line(f"    matrix_behind(keys, kk / 4 * {s.keys * 128} + kk % 4 * 32), kk > 0);")
                else:
                    w.line("    s, matrix_behind(queries, kk * 32), matrix_behind(keys, kk * 32), kk > 0);")

    def _multiply_values(self, stage: str) -> None:
        """Writes the start of the products of the probabilities with the values of a stage."""
        b, w, sums = self.b, self.w, self.sums
        leading = 16 if b.narrow else b.s.keys * 2 * PANEL
        with w.block(""):
            place = f"shared.values[{stage}.index][0][0]"
            w.line(f"const uint64 values = matrix_descriptor<128>({place}, {leading}, 1024);")
            steps = f"for (int kk = 0; kk < {b.s.keys // b.step}; ++kk)"
            with products(w, sums, (b.values, stage), registers="probability"), w.unrolled(steps):
                w.line(f"wgmma<{b.element}, {b.element}, {b.width}{self.options}>(")
                w.line(f"    {sums}, probability[kk], matrix_behind(values, kk * {self.behind}), {self.adding});")

    def _add(self) -> None:
        """Writes the addition of a tile's products with values to the results, where wgmma does not add them up."""

    def _rescale(self, first: bool) -> None:
        """Writes the multiplication of the results with factors, of tiles but the first."""
        if not first:
            self.w.reads("o")
            self.w.line("attention::scale(o, rescale);")

    def _round(self, *, first: bool = False) -> None:
        """Writes the rounding of a tile's exponentials to the operand of the products with values."""
        self._rescale(first)
        self.w.writes("probability")
        quads = "_quads" if self.b.scores.quads else ""
        self.w.line(f"attention::round{quads}_to_fragments<{self.b.element}>(s, probability);")


class _NarrowConsumer(_Consumer):
    """The same with 8-bit floats: a tile's products with values are added up apart, and to the results in float32."""

    sums, options, behind, adding = "part", "", 32, "kk > 0"

    def _declare(self) -> None:
        super()._declare()
        width = self.b.width
        self.w.line(f"float part[{width // 2}], before[2];  // a tile's products with values, and o's next factors")

    def _add(self) -> None:
        self.w.reads("part")
        self.w.line("attention::add(o, before, part);")

    def _rescale(self, first: bool) -> None:
        self.w.line("before[0] = rescale[0];")
        self.w.line("before[1] = rescale[1];")
