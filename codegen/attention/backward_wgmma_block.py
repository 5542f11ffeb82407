"""Attention's gradients on Hopper: what the blocks of both forms have in common.

These are tiles and what brings them, products of consumers, and results.  One thread has TMA bring tiles.  The numbers
of queries, lse and row_dot, may have any strides: warps bring them by ordinary loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from math import prod

from codegen.attention.backward_fragments import BackwardFragments
from codegen.attention.backward_scores import INTERVALS
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma_schedule import AttentionBackwardWgmmaSchedule, tiles
from codegen.attention.fragments import padded
from codegen.attention.scores import kernel_detail
from codegen.attention.wgmma_schedule import PANEL, ROWS, box, coordinates
from codegen.buffers import Buffer, Buffers, Edge
from codegen.declined import Declined
from codegen.expr import Operand, literal
from codegen.iteration import linear
from codegen.kernel import Kernel, parameter
from codegen.pipeline import GROUP, Pipeline, await_products, products
from codegen.spec import KernelSource, TensorMap


@dataclass(frozen=True)
class Tile:
    """Tiles of an operand: what they are in shared memory, elements of a row, the tensor map and its C name."""

    op: Operand
    buffer: Buffer
    elements: int
    map: TensorMap
    map_name: str


@dataclass(frozen=True)
class Result:
    """A result: the C variables of its sums and of their operand A, the tiles of operand B, and those whose place it
    takes; its factor, operand and C name, which is that of its tensor map if TMA stores it.
    """

    sums: str
    a: str
    b: Tile
    held: Tile
    factor: float
    op: Operand
    name: str
    mapped: bool


class Block:
    """Writes the parts of a kernel whose blocks hold tiles of rows, and to which tiles of columns are brought.

    held, brought  the tiles of the scores and of the products with the loss; rows and ring are their pipelines.
    by_s, by_p     what is summed up of gradients and of probabilities.
    part           C expression of a consumer's first row in a tile; first_row that among all rows.
    """

    def __init__(
        self, spec: AttentionBackwardSpec, s: AttentionBackwardWgmmaSchedule, registers: tuple[int, int]
    ) -> None:
        self.spec, self.s, self.a, self.registers = spec, s, spec.attention, registers
        w = self.w = Kernel(spec.name)
        self.part = f"group * {ROWS}" if s.groups > 1 else "0"
        self.first_row = linear([("r0", 1), ("group", ROWS if s.groups > 1 else 0)])
        maps = [w.names.unique(op.name, "_map") for op in spec.arguments[:4]]
        self.lse, self.row_dot = (w.names.unique(op.name) for op in spec.arguments[4:])
        self.scores = BackwardFragments(w, spec, s.height, s.cols, self.first_row, ROWS)
        self.work = self.scores.tiles * prod(spec.batch)
        every = [self._operand(buffer, maps) for buffer in tiles(spec, s)]
        self.held, self.brought = every[:2], every[2:]
        for tile in sorted(every, key=lambda tile: tile.map.argument):
            w.take(tile.map_name, map_=tile.map)
        numbers = (parameter(op, name) for op, name in zip(spec.arguments[4:], (self.lse, self.row_dot)))
        w.take(*numbers, *self.scores.parameters())
        apart = spec.second is not None and s.apart
        self.by_s = self._result("by_s", "g_factor" if apart else "factor", 0, spec.factor, spec.first)
        self.by_p = self._result("by_p", "factor", 1, 1.0, spec.second)
        self.results = [r for r in (self.by_s, self.by_p) if r is not None]
        self.mapped = [r for r in self.results if r.mapped]
        self.rows = Pipeline(w, "held", s.ahead, releases=s.groups)
        self.ring = Pipeline(w, "", s.stages, releases=s.groups)

    def _operand(self, buffer: Buffer, maps: list[str]) -> Tile:
        a, number = self.a, ("queries", "keys", "values", "losses").index(buffer.name)
        op, rows = self.spec.arguments[number], (a.rows, a.keys, a.keys, a.rows)[number]
        elements = a.depth if number < 2 else a.width
        return Tile(op, buffer, elements, box(a, op, number, rows, elements, buffer.shape[1]), maps[number])

    def _result(self, sums: str, a: str, which: int, factor: float, op: Operand | None) -> Result | None:
        if op is None:
            return None
        w, held, found = self.w, self.held[which], None
        if op.dtype.itemsize == 2:
            with suppress(Declined):
                found = box(self.a, op, len(w.passed), self.spec.rows, held.elements, ROWS)
        name = w.names.unique(op.name, "_map" if found else "")
        w.take(name if found else parameter(op, name, written=True), map_=found)
        return Result(sums, a, self.brought[which], held, factor, op, name, found is not None)

    def source(self, blocks: int, zeroed: tuple[tuple[int, int], ...] = ()) -> KernelSource:
        """Returns the kernel, whose body is complete."""
        s = self.s
        tiles = f"for {s.height} {self.spec.over} a block, tiles of {s.cols} of the others in {s.stages} stages"
        consumers = f"{s.groups} consumer warpgroup{'s' if s.groups > 1 else ''}"
        program, details = self.a.program, (kernel_detail(self.a), f"{tiles} filled by TMA, {consumers}")
        return self.w.source(
            program, details, blocks=blocks, threads=s.threads, barriers=True, blocks_per_sm=1, zeroed=zeroed
        )

    # ---- the block

    @contextmanager
    def begin(self, buffers: Buffers) -> Iterator[None]:
        """Writes what lies in shared memory, and what one thread does first, around what it does besides."""
        w = self.w
        w.share(buffers)
        w.line(f"const int group = int(threadIdx.x / {GROUP}) - 1;  // a warpgroup: consumers count from 0")
        with w.block("if (threadIdx.x == 0)"):
            for pipeline in (self.rows, self.ring):
                with w.block(f"for (int i = 0; i < {pipeline.stages}; ++i)"):
                    pipeline.init()
            yield
            w.line("barrier_fence_init();")
        w.line("__syncthreads();")
        w.line()

    # ---- what brings tiles and numbers

    def producer(self, work: AbstractContextManager[None]) -> None:
        """Writes the thread that has TMA bring tiles, for what ``work`` goes through."""
        w, s, ranged = self.w, self.s, self.scores.ranged
        w.line(f"registers_decrease<{self.registers[0]}>();")
        w.line(f"Ring<{s.stages}> stage;")
        w.line(f"Ring<{s.ahead}> held;")
        if ranged:  # all lanes of a warp look at rows; one of them brings tiles
            w.line("const int lane = threadIdx.x % 32;")
        with w.role("producer", f"threadIdx.x {'< 32' if ranged else '== 0'}"), work:
            self.scores.intervals()
            self.rows.acquire("held")
            with w.block("if (lane == 0)", when=ranged):
                for n, name in enumerate(INTERVALS if ranged else ()):
                    w.line(f"shared.met[held.index][{n}] = {name};")
                self._load(self.held, self.rows, "held", "r0")
            with self.scores.met(), w.loop("for (int tile = first; tile < last; ++tile, ++stage)"):
                self.ring.acquire()
                if ranged:
                    w.line("if (lane != 0) continue;")
                self._load(self.brought, self.ring, "stage", f"tile * {s.cols}")

    def _load(self, tiles: list[Tile], pipeline: Pipeline, stage: str, first: str) -> None:
        """Writes the copies of tiles to a stage; ``first`` is their first row or column."""
        w = self.w
        pipeline.expect(sum(tile.buffer.stage_bytes for tile in tiles), stage)
        for tile in tiles:
            count, at = tile.buffer.shape[0], coordinates(self.a, tile.op, first)
            if count > 1:
                w.line("#pragma unroll 1  // the producer has few registers")
            with w.block(f"for (int i = 0; i < {count}; ++i)", when=count > 1):
                i, x = ("i", f"i * {PANEL}") if count > 1 else ("0", "0")
                to = f"shared.{tile.buffer.name}[{stage}.index][{i}]"
                w.line(f"tma_load({to}, {tile.map_name}, {pipeline.full(stage)}, {x}, {at});")
            pipeline.copied(count * tile.op.dtype.itemsize * prod(tile.map.box), stage)

    def bring_numbers(self, place: str) -> None:
        """Writes how a warp brings the numbers of a tile of queries."""
        w, cols, with_loss = self.w, self.s.cols, self.spec.with_loss
        exists, i = Edge(self.spec.cols, cols).inside("x"), f"i % {cols}" if with_loss else "i"
        text = self.scores.lse_of(self.lse, "x", exists)
        if with_loss:
            first = f"({text})" if exists else text
            text = f"i < {cols} ? {first} : {self.scores.row_dot_of(self.row_dot, 'x', exists)}"
        count = cols * (1 + with_loss)
        # Loads one after the other may take longer than a tile; there are registers for three or four of one kind.
        few, of_one_kind = self.registers[0] < 40, cols % 32 == 0
        at_once = 1 if few else cols // 32 if of_one_kind else 2
        if of_one_kind and cols <= 64:
            at_once = count // 32
        w.line(f"#pragma unroll {at_once}")
        with w.block(f"for (int i = threadIdx.x % 32; i < {count}; i += 32)"):
            w.line(f"const {self.scores.t} x = tile * {cols} + {i};")
            w.line(f"shared.numbers{place}[{f'i / {cols}' if with_loss else '0'}][{i}] = {text};")

    # ---- the consumers

    def begin_consumer(self) -> None:
        """Writes what a consumer knows of itself."""
        w, s = self.w, self.s
        row = linear([("group", ROWS if s.groups > 1 else 0), ("t / 32 * 16", 1), ("lane / 4", 1)])
        w.line(f"registers_increase<{self.registers[1]}>();")
        w.line(f"const int t = threadIdx.x % {GROUP}, lane = t % 32;")
        w.line(f"const int row = {row};  // of a thread's first result in the tile")
        self.scores.unit()
        self.scores.scalars()
        w.line(f"Ring<{s.stages}> stage;")

    def fragments(self, *more: str) -> None:
        """Declares the sums of a tile of rows, the products with a tile of columns, and operands A."""
        for r in self.results:
            self.w.line(f"float {r.sums}[{padded(r.held.elements) // 2}] = {{}};")
        self.scores.arrays(dict.fromkeys(["factor", *(r.a for r in self.results)]), *more)

    def wgmma(self, steps: int, width: int, *operands: str, turned: bool = True) -> None:
        """Writes products of so many columns, 16 elements a step; ``turned``: operand B has them in its rows."""
        w, t = self.w, self.scores.element_type
        w.macros[f"FUSEGRAPH_WGMMA({width})"] = None
        with w.unrolled(f"for (int kk = 0; kk < {steps}; ++kk)"):
            w.line(f"wgmma<{t}, {t}, {width}{', 1' if turned else ''}>(")
            for text in operands:
                w.line(f"    {text}")

    def multiply(self, sums: str, which: int) -> None:
        """Writes the products of the rows with a tile of columns: scores, or products with the loss."""
        held, brought = self.held[which], self.brought[which]
        a = descriptor(f"&shared.{held.buffer.name}[held.index][kk / 4][{self.part}][kk % 4 * 16]")
        b = descriptor(f"&shared.{brought.buffer.name}[stage.index][kk / 4][0][kk % 4 * 16]")
        with products(self.w, sums, (self.rows, "held"), (self.ring, "stage")):
            self.wgmma(-(-held.elements // 16), self.s.cols, f"{sums}, {a},", f"{b}, kk > 0);", turned=False)

    def probabilities(self, numbers: str) -> None:
        """Writes a tile's probabilities; ``numbers`` is the place of the tile's numbers, if columns are queries."""
        self.scores.probabilities("tile", f"&shared.numbers{numbers}[0][0]")
        if self.by_p:
            self.w.writes(self.by_p.a)

    def gradients(self, numbers: str, by_scores: str = "") -> None:
        """Writes a tile's gradients, as operands A once products no longer read what these overwrite."""
        row_dot, a = f"&shared.numbers{numbers}[1][0]", self.by_s.a if self.by_s else ""

        def ready() -> None:
            if self.by_p and self.by_p.a == a:
                await_products(self.w, note="the operands are no longer needed")
            self.w.writes(a)

        self.scores.gradients("tile", row_dot, by_scores, a, ready)

    def add(self, result: Result | None) -> None:
        """Writes the products of operands A with a tile of columns, which are added to a result, if there is one."""
        if result is None:
            return
        b = descriptor(f"&shared.{result.b.buffer.name}[stage.index][0][kk * 16][0]", self.s.cols * 128)
        with products(self.w, result.sums, (self.ring, "stage"), registers=result.a):
            steps, width = self.s.cols // 16, padded(result.b.elements)
            self.wgmma(steps, width, f"{result.sums}, {result.a}[kk], {b}, true);")

    # ---- results

    def store(self) -> None:
        """Writes the results: by threads, or by TMA from where the tiles of rows were.

        These may be brought again then; where there is another place for them, the consumer says so later.
        """
        w = self.w
        for r in self.results:
            if not r.mapped:
                self.scores.store(r.sums, r.op, r.name, r.held.elements, padded(r.held.elements), r.factor)
        if not self.mapped:
            # Warps that multiply are in step; where there was nothing to multiply one may be late.
            w.line(f"named_barrier_sync(1 + group, {GROUP});  // all warps have been here")
            self.rows.release("held")
            return
        w.line("// The results take the place of what the block kept, of which nothing is left to multiply.")
        for r in self.mapped:
            self._hand_over(r)
        w.line("fence_async_shared();")
        w.line(f"named_barrier_sync(1 + group, {GROUP});")
        with w.block("if (t == 0)"):
            for r in self.mapped:
                with w.unrolled(f"for (int i = 0; i < {r.held.buffer.shape[0]}; ++i)"):
                    at = f"i * {PANEL}, {coordinates(self.a, r.op, self.first_row)}"
                    w.line(f"tma_store({r.name}, shared.{r.held.buffer.name}[held.index][i][{self.part}], {at});")
            w.line("tma_commit();")
            if self.s.ahead > 1:
                w.line("stored = true;")
            else:
                w.line("tma_wait_read<0>();")
                self.rows.release("held", condition="")

    def _hand_over(self, r: Result) -> None:
        """Writes a result, rounded, to the place from where TMA stores it."""
        w, out = self.w, r.op.dtype.ctype
        with w.unrolled(f"for (int j = 0; j < {padded(r.held.elements)}; j += 16)"):
            w.line(f"Vector<{out}, 2> v[4];")
            factor = "" if r.factor == 1 else f"{literal(r.factor, 'float')} * "
            value = f"{factor}{r.sums}[j / 2 + i]"
            w.unrolled_line(f"for (int i = 0; i < 8; ++i) v[i / 2][i % 2] = convert<{out}>({value});")
            pointer = f"&shared.{r.held.buffer.name}[held.index][j / {PANEL}][{self.part}][0]"
            if out != self.scores.element_type:
                pointer = f"reinterpret_cast<{out}*>({pointer})"
            w.line(f"store_fragments<{PANEL}>({pointer}, t / 32 * 16, j % {PANEL}, v);")


def descriptor(place: str, leading: int = 16) -> str:
    """Returns the matrix descriptor of swizzled panels, with the bytes between two of them along the columns."""
    return f"matrix_descriptor<128>({place}, {leading}, 1024)"
