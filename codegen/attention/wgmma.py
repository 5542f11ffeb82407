"""Attention on Hopper: both products by warpgroups (wgmma), of tiles that TMA brings.

The pipeline is that of FlashAttention-3 (Shah et al., 2024).  One thread fills two rings of stages, of keys and of
values.  Each consumer, a warpgroup, has 64 queries.  It gives two products at a time to the tensor cores, that of its
queries with the next tile of keys and that of the probabilities of a tile, which lie in registers, with its values.
Then it computes the exponentials of the next tile, while the tensor cores work for the other consumers: they
ping-pong.  Blocks are persistent: behind the last product of a tile of queries, a block starts the first product of its
next tile.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from codegen.attention.computed import Rows, RowsPrologue
from codegen.attention.fragments import ScoreFragments
from codegen.attention.listing import Listing
from codegen.attention.scores import approximated, argument_names, kernel_details, merged
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_results import AttentionResults
from codegen.attention.wgmma_schedule import (
    GROUP,
    PANEL,
    ROWS,
    AttentionWgmmaSchedule,
    box,
    columns,
    dynamic,
    listed,
    narrow,
    quads_box,
    shared_bytes,
    spanned,
    values_box,
)
from codegen.declined import Declined
from codegen.iteration import linear
from codegen.kernel import Kernel, parameter
from codegen.spec import KernelSource, TensorMap

#: The largest power of two that is an 8-bit float, nearly: what the largest exponential of a row becomes.
LIFT = {"float8_e4m3": 8, "float8_e5m2": 15}


def render(spec: AttentionSpec, schedule: AttentionWgmmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Renderer(merged(spec), schedule).render()


class _Renderer(AttentionResults):
    def __init__(self, spec: AttentionSpec, schedule: AttentionWgmmaSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.w = Kernel(spec.name)
        self.names = self.w.names
        arguments = argument_names(spec, self.names)
        self.q, self.k, self.v = (name and self.names.unique(name, "_map") for name in arguments[:3])
        self.sink = arguments[-1] if spec.sink is not None else ""
        self.pointers = arguments[3:]
        top = linear([("m0", 1), ("group", ROWS if schedule.groups > 1 else 0)])
        known = {"listed": listed(spec), "spanned": spanned(spec)}
        self.scores = ScoreFragments(self.w, spec, self.names, schedule.keys, top, ROWS, schedule.rows, **known)
        self.prologue = self.scores.computed[0]
        self.narrow = narrow(spec)
        self.scores.lift = LIFT.get(spec.q.dtype.name, 0)
        self.size = spec.q.dtype.itemsize
        #: elements of queries and keys in a row of 128 bytes
        self.panel = 2 * PANEL // self.size
        #: registers of a thread of the producer and of a consumer
        self.registers = schedule.registers(listing=listed(spec), spanned=spanned(spec))
        #: how the producer finds the tiles that are met, where that depends on data
        self.listing = Listing(self.w, spec, self.scores, schedule.rows) if listed(spec) else None
        quads = quads_box(spec) if self.narrow else None
        #: whether, of each four keys of a tile, two are in its first half: then a thread has four neighbours' scores
        self.quads = self.scores.quads = quads is not None
        maps = [
            None if self.prologue is not None else box(spec, spec.q, 0, spec.rows, spec.depth, schedule.rows),
            quads or self._box(spec.k, 1, spec.depth),
            values_box(spec) if self.narrow else self._box(spec.v, 2, spec.width),
        ]
        self.maps = [replace(x, argument=n) for n, x in enumerate(x for x in maps if x is not None)]
        self.element = spec.q.dtype.ctype
        #: products that a wgmma adds up along the reduction
        self.step = 32 // self.size
        self.width = columns(spec.width)
        number = len(spec.read) + len(spec.loads)
        self.out_map = None
        try:
            if spec.out.dtype.itemsize == 2 and spec.epilogue is None:
                self.out_map = box(spec, spec.out, number, spec.rows, spec.width, ROWS)
        except Declined:
            pass
        self.out, self.stats = self.names.unique(spec.out.name, "_map"), ""
        self.written = self.scores.written(self.names)
        if spec.stats is not None:
            self.stats = self.written[-1]
        self.order = self.names.unique(spec.order.name) if spec.order is not None and dynamic(spec) else ""
        self.tiles = -(-spec.rows // schedule.rows)
        self.batches = prod(spec.batch)
        #: whether the first product of a tile of queries begins while the one before ends; both have tiles of keys
        #: whether lanes of a warp bring the pages of a tile side by side
        self.spread = spec.pages is not None and not spec.ranges and min(p.size for p in spec.pages) < schedule.keys
        self.joined = schedule.joined(spec)

    def render(self) -> KernelSource:
        w, s, spec = self.w, self.s, self.spec
        program = approximated(spec)
        details = [
            *kernel_details(spec),
            f"{s.rows} queries a block, tiles of {s.keys} keys in {s.stages} stages filled by TMA, {s.groups} consumer "
            f"warpgroup{'s' if s.groups > 1 else ''} (m64n{s.keys}k{self.step}, m64n{self.width}k{self.step})",
        ]
        w.macros |= dict.fromkeys(f"FUSEGRAPH_WGMMA({n})" for n in (s.keys, self.width))
        constant = "const __grid_constant__ TensorMap "
        parameters = [constant + name for name in (self.q, self.k, self.v) if name]
        parameters += [parameter(op, name) for op, name in zip(spec.arguments[3:], self.pointers)]
        parameters += self.scores.parameters()
        written = [parameter(op, name, written=True) for op, name in zip(spec.written, self.written)]
        parameters += [constant + self.out, *written[1:]] if self.out_map else written
        if self.order:
            assert spec.order is not None
            parameters.append(parameter(spec.order, self.order, written=True))
        w.parameters += parameters
        self._shared()
        self._barriers()
        w.open("if (group < 0)")
        self._producer()
        w.otherwise()
        self._consumer()
        w.close()
        out = len(spec.read) + len(spec.loads)
        passed: list[int | TensorMap] = [*self.maps, *range(len(self.maps), out)]
        passed += [self.out_map or out, *range(out + 1, out + len(spec.written))]
        work = self.tiles * self.batches
        zeroed: tuple[tuple[int, int], ...] = ()
        if self.order:
            passed.append(out + len(spec.written))
            zeroed = ((out + len(spec.written), 4),)
        return w.source(
            program,
            details,
            blocks=min(work, s.blocks),
            threads=s.threads,
            barriers=True,
            blocks_per_sm=1,
            shared_bytes=shared_bytes(spec, s),
            arguments=passed,
            zeroed=zeroed,
        )

    # ---- the consumers

    def _turn(self, *, begin: bool) -> None:
        if self.s.pingpong:
            groups = self.s.groups
            other = "2 - group" if groups == 2 else f"1 + (group + 1) % {groups}"
            if begin:
                self.w.line(f"named_barrier_sync(1 + group, {2 * GROUP});  // this consumer's turn")
            else:
                self.w.line(f"named_barrier_arrive({other}, {2 * GROUP});")

    def _consumer(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        w.line(f"registers_increase<{self.registers[1]}>();")
        w.line(f"const int t = threadIdx.x % {GROUP}, lane = t % 32;")
        w.line(
            f"const int row = {linear([('group', ROWS if s.groups > 1 else 0), ('t / 32 * 16', 1), ('lane / 4', 1)])};"
            "  // of a thread's first result in the tile"
        )
        w.line(f"Ring<{s.stages}> stage;")
        w.line(f"Ring<{s.ahead}> query;")
        self.scores.unit()
        self.scores.scalars()
        if self.prologue is not None:
            self._define_queries(self.prologue)
        if s.pingpong:
            w.line(f"if (group == {s.groups - 1}) named_barrier_arrive(1, {2 * GROUP});  // consumer 0 begins")
        if self.joined:
            self._registers()
            if self.scores.spanned:
                self._read_span("attention::Span span", "query")
            self._await_queries("query", "blockIdx.x")
            w.line("barrier_wait(shared.keys_full[stage.index], stage.parity);")
            self._first_product("query")
        if not self.scores.spanned:
            self._work(keys=not self.listing)
        elif self.joined:
            w.open(f"while (span.work < {self.tiles * self.batches})")
            self._tile_at("span.work")
        else:
            self._next_span()
        self.scores.state(self.sink, self.width)
        if not self.joined:
            self._await_queries("query", "work")
        if self.listing:
            w.line("barrier_wait(shared.keys_full[stage.index], stage.parity);")
            w.line("int tile = shared.tiles[stage.index];")
            w.open("if (tile >= 0)")
        elif spec.some_meet_none and not self.joined:
            w.open(f"if ({self.first} < {self.last})")
        if not self.joined:
            self._registers()
        self.scores.define()
        if not self.joined:
            if not self.listing:
                w.line("barrier_wait(shared.keys_full[stage.index], stage.parity);")
            self._first_product("query")
        if self.prologue is not None and self._goes_on:
            w.line(f"prefetch_queries({self._following()});")
        w.line("wgmma_wait<0>();")
        w.line("if (t == 0) barrier_arrive(shared.keys_empty[stage.index]);")
        self.scores.make("tile" if self.listing else f"{self.last} - 1")
        self.scores.softmax(s.chains)
        self._round(free=self.joined and self.out_map is not None)
        if self.listing:
            w.line(f"Ring<{s.stages}> previous = stage;")
            w.open("while (true)")
            w.line("previous = stage;")
        else:
            w.open(f"for (int tile = {self.last} - 2; tile >= {self.first}; --tile)")
            w.line(f"const Ring<{s.stages}> previous = stage;")
        w.line("++stage;")
        w.line("barrier_wait(shared.keys_full[stage.index], stage.parity);")
        if self.listing:
            w.line("tile = shared.tiles[stage.index];")
            w.line("if (tile < 0) break;")
        self._turn(begin=True)
        self._multiply_keys("stage")
        w.line("barrier_wait(shared.values_full[previous.index], previous.parity);")
        self._multiply_values("previous")
        self._turn(begin=False)
        w.line("wgmma_wait<1>();  // the scores are there")
        w.line("if (t == 0) barrier_arrive(shared.keys_empty[stage.index]);")
        self.scores.make("tile")
        # Where consumers do not ping-pong and multiply 8-bit floats, it was faster to look for maxima while the
        # products with values go on.
        apart = self.narrow and not s.pingpong
        if apart:
            self.scores.largest(s.chains)
        # The other consumers' products run meanwhile; what follows may be done in any order, such as rounding while the
        # units for exponentials are busy, but only once nothing reads the probabilities of the tile before.
        w.line("wgmma_wait<0>();")
        w.line("if (t == 0) barrier_arrive(shared.values_empty[previous.index]);")
        self._add_part()
        if apart:
            self.scores.exponentials(s.chains)
        else:
            self.scores.softmax(s.chains)
        self._round(again=True)
        w.close()
        latest = "previous" if self.listing else "stage"
        w.line(f"barrier_wait(shared.values_full[{latest}.index], {latest}.parity);")
        self._multiply_values(latest)
        if self.joined:
            self._begin_next()
            w.line("if (t == 0) barrier_arrive(shared.values_empty[previous.index]);")
        else:
            w.line("wgmma_wait<0>();")
            w.line(f"if (t == 0) barrier_arrive(shared.values_empty[{latest}.index]);")
        self._add_part()
        if self.listing:
            w.close()
            w.line("barrier_wait(shared.values_full[stage.index], stage.parity);  // the end of the list")
            self._meet()
            with w.block("if (t == 0)"):
                w.line("barrier_arrive(shared.keys_empty[stage.index]);")
                w.line("barrier_arrive(shared.values_empty[stage.index]);")
            w.line("++stage;")
        elif not self.joined:
            w.line("++stage;")
            if spec.some_meet_none:
                w.close()
        self._results()
        w.line("query = next;" if self.joined else "++query;")
        if self.joined and self.scores.spanned:
            w.line("span = following;")
        w.close()
        if self.joined:
            w.line("wgmma_wait<0>();  // nothing is in flight, but the compiler cannot know")
        if self.out_map is not None:
            w.line("if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it")

    def _await_queries(self, query: str, work: str) -> None:
        """Writes the wait for a tile of queries, or the call that computes the consumer's part of it."""
        if self.prologue is None:
            self.w.line(f"barrier_wait(shared.queries_full[{query}.index], {query}.parity);")
        else:
            self.w.line(f"compute_queries({work}, {query}.index);")

    def _define_queries(self, prologue: RowsPrologue) -> None:
        """Writes the functions that compute a consumer's part of a tile of queries, and that prefetch what
        this reads.
        """
        w, s, spec, scores = self.w, self.s, self.spec, self.scores
        part = f"group * {ROWS}" if s.groups > 1 else "0"
        meet = f"named_barrier_sync({s.groups + 1} + group, {GROUP});"
        first = linear([("m0", 1), ("group", ROWS if s.groups > 1 else 0)])
        last = spec.rows - 1 if spec.rows % s.rows else None
        padded = -(-spec.depth // self.step) * self.step
        rows = Rows(first, last, ROWS, padded, "t", GROUP, scores.batch, scores.t, self.element)
        tile = f"const Tile at = tile_at<{self.batches}, {self.tiles}, {min(s.heads, self.batches)}>(work);"

        def store(name: str) -> None:
            place = f"&shared.queries[index][d / {self.panel}][{part}][0], r, d % {self.panel}"
            w.line(f"store_row<{self.panel}>({place}, {name});")

        with w.block("const auto compute_queries = [&](int work, int index)", "};"):
            w.line(tile)
            scores.begin("at.row", "at.col")
            held = prologue.hold(rows)
            if self.out_map is not None:
                # The results stored last may lie in the other place.
                w.line(f"if (t == 0) tma_wait_read<{0 if self.joined else s.ahead - 1}>();  // what lay there has left")
            w.line(f"{meet}  // and has been multiplied by all warps")
            if held is None:
                prologue.fill(rows, store)
            else:
                prologue.put(rows, held, store)
            w.line("fence_async_shared();")
            w.line(f"{meet}  // the consumer's rows are there")
        if self._goes_on:
            with w.block("const auto prefetch_queries = [&](int work)", "};"):
                w.line(f"if (work >= {self.tiles * self.batches}) return;")
                w.line(tile)
                scores.begin("at.row", "at.col")
                prologue.prefetch(rows)

    @property
    def _goes_on(self) -> bool:
        """Whether a block has several tiles of queries."""
        return self.tiles * self.batches > self.s.blocks

    def _registers(self) -> None:
        """Declares the scores of a tile and, rounded, its probabilities."""
        w, s = self.w, self.s
        w.line(f"float s[{s.keys // 2}], rescale[2];")
        w.line(f"uint32 probability[{s.keys // self.step}][4];")
        if self.narrow:
            w.line(f"float part[{self.width // 2}], before[2];  // a tile's products with values, and o's next factors")

    def _first_product(self, query: str) -> None:
        """Writes the start of the product of queries with the first tile of keys."""
        self._turn(begin=True)
        self._multiply_keys("stage", query)
        self._turn(begin=False)

    def _begin_next(self) -> None:
        """Writes the start of the first product of the block's next tile of queries, behind the last one of
        this tile.
        """
        w, s = self.w, self.s
        w.line(f"const Ring<{s.stages}> previous = stage;")
        w.line("++stage;")
        w.line(f"Ring<{s.ahead}> next = query;")
        w.line("++next;")
        if self.scores.spanned:
            self._read_span("const attention::Span following", "next")
        following = "following.work" if self.scores.spanned else self._following()
        w.open(f"if ({following} < {self.tiles * self.batches})")
        self._await_queries("next", self._following())
        w.line("barrier_wait(shared.keys_full[stage.index], stage.parity);")
        self._first_product("next")
        w.line("wgmma_wait<1>();  // the results are there")
        w.otherwise()
        w.line("wgmma_wait<0>();")
        w.close()

    def _round(self, *, again: bool = False, free: bool = False) -> None:
        """Writes the rounding of exponentials to the operand of the products with the tile's values."""
        w = self.w
        if free and self.prologue is None:
            self._free_queries()
        if self.narrow:
            w.line("before[0] = rescale[0];")
            w.line("before[1] = rescale[1];")
        elif again:
            w.line("attention::scale(o, rescale);")
        w.line(f"attention::round{'_quads' if self.quads else ''}_to_fragments<{self.element}>(s, probability);")

    def _add_part(self) -> None:
        """Writes the addition of the last products with values to the results, where wgmma does not add them
        up itself.
        """
        if self.narrow:
            self.w.line("attention::add(o, before, part);")

    def _multiply_keys(self, stage: str, query: str = "query") -> None:
        w, s, spec = self.w, self.s, self.spec
        steps = -(-spec.depth // self.step)
        part = f"group * {ROWS}" if s.groups > 1 else "0"
        with w.block(""):
            w.line(
                f"const uint64 queries = matrix_descriptor<128>(shared.queries[{query}.index][0][{part}], 16, 1024);"
            )
            w.line(f"const uint64 keys = matrix_descriptor<128>(shared.keys[{stage}.index][0][0], 16, 1024);")
            w.line("wgmma_fence();")
            with w.unrolled(f"for (int kk = 0; kk < {steps}; ++kk)"):
                w.line(f"wgmma<{self.element}, {self.element}, {s.keys}>(")
                if steps > 4:
                    w.line(f"    s, matrix_behind(queries, kk / 4 * {s.rows * 128} + kk % 4 * 32),")
                    w.line(f"    matrix_behind(keys, kk / 4 * {s.keys * 128} + kk % 4 * 32), kk > 0);")
                else:
                    w.line("    s, matrix_behind(queries, kk * 32), matrix_behind(keys, kk * 32), kk > 0);")
            w.line("wgmma_commit();")

    def _multiply_values(self, stage: str) -> None:
        w, s = self.w, self.s
        with w.block(""):
            leading = 16 if self.narrow else s.keys * 2 * PANEL
            w.line(
                f"const uint64 values = matrix_descriptor<128>(shared.values[{stage}.index][0][0], {leading}, 1024);"
            )
            w.line("wgmma_fence();")
            with w.unrolled(f"for (int kk = 0; kk < {s.keys // self.step}; ++kk)"):
                if self.narrow:
                    w.line(f"wgmma<{self.element}, {self.element}, {self.width}>(")
                    w.line("    part, probability[kk], matrix_behind(values, kk * 32), kk > 0);")
                else:
                    w.line(f"wgmma<{self.element}, {self.element}, {self.width}, 1>(")
                    w.line("    o, probability[kk], matrix_behind(values, kk * 2048), true);")
            w.line("wgmma_commit();")
