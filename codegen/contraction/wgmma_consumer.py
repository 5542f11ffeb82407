"""The consumers of the Hopper kernels: warpgroups that multiply the stages of a tile, and hand its sums over.

What a consumer does with a stage is a `MainLoop`: it multiplies the tiles as they lie in shared memory, adds up the
sums of each stage by itself, or computes the fragments of operand A.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from codegen.bf16x6 import BF16X6, LARGE, PARTS, SMALL
from codegen.contraction.wgmma_block import Block
from codegen.contraction.wgmma_computed import OperandAWriter
from codegen.contraction.wgmma_layout import GROUP, GROUP_ROWS
from codegen.contraction.wgmma_loads import OperandWriter
from codegen.contraction.wgmma_results import Results
from codegen.contraction.wgmma_schedule import adds_up_stages
from codegen.iteration import linear
from codegen.operands import STEP_BYTES, ComputedOperand, Gathered, MappedOperand, panel_size
from codegen.pipeline import Signals, await_products, products
from codegen.scaled_tiles import ScaledOperand
from codegen.tile_path import ELEMENTS, TilePath


class MainLoop:
    """The products of a tile's stages, in the operands' ``types``: while one is multiplied, that before is released."""

    def __init__(self, block: Block, types: tuple[str, str]) -> None:
        self.block, self.w, self.s, self.ring = block, block.w, block.s, block.ring
        a, b = (ELEMENTS[name][0] if name == BF16X6 else name for name in types)
        self.wgmma = f"wgmma<{a}, {b}, {block.columns}"
        #: Unrolling it makes compilation a fifth longer; only products of few columns are too short to hide the loop.
        self.rolled = block.s.groups > 1 or block.columns > GROUP_ROWS

    def begin(self) -> None:
        """Writes what stays the same for all tiles."""

    def begin_tile(self) -> None:
        """Declares the sums of a tile."""
        self._declare_sums()
        self.w.line("int previous = 0;")

    def _declare_sums(self) -> None:
        block = self.block
        pieces = f"[{self.s.pieces}]" if self.s.pieces > 1 else ""
        zero = " = {}" if block.phased or block.idle else ""
        self.w.line(f"{block.register_type} sum{pieces}[{block.columns // 2}]{zero};")

    def stage(self, first: str) -> None:
        """Writes what is done with a stage that is full."""
        self._multiply(self.block.sum, f"k > {first} || kk > 0")
        with self.w.block(f"if (k > {first})"):
            await_products(self.w, 1, "the products of the previous stage are done")
            self.ring.release("previous", at="previous")
        self.w.line("previous = stage.index;")
        self.w.moved("stage", "previous")

    def end_tile(self) -> None:
        """Writes the wait for the sums, and the release of the last stage."""
        await_products(self.w)
        if self.s.split_k == 1:  # else the ring is not filled again
            some = "last > 0 && " if self.block.phased else ""
            self.ring.release("previous", condition=f"{some}t == 0", at="previous")

    def _multiply(self, sums: str, adds: str) -> None:
        """Writes the products of a stage, which are added to the sums where the C condition ``adds`` holds."""
        w, block = self.w, self.block
        assert not isinstance(block.parts.a, ComputedOperand)
        if self.s.gather:
            w.line("fence_async_shared();  // the producer's copies are ordinary writes")
        with products(w, sums.partition("[")[0], (self.ring, "stage")), self._steps(), block.pieces():
            a, b = block.parts.a, block.parts.b
            flags = "" if a.along_k and b.along_k else f", {int(not a.along_k)}, {int(not b.along_k)}"
            place = block.rows if a.along_k else block.rows.removesuffix(f" * {GROUP_ROWS}")
            w.line(f"{self.wgmma}{flags}>(")
            w.line(f"    {sums}, {self._descriptor(a, 'a', self.s.tile_m, place)},")
            w.line(f"    {self._descriptor(b, 'b', block.columns)}, {adds});")

    def _steps(self) -> AbstractContextManager[None]:
        return self.w.unrolled(f"for (int kk = 0; kk < {self.block.parts.reduction.steps}; ++kk)")

    def _descriptor(
        self, side: MappedOperand | Gathered | TilePath, name: str, size: int, place: str = "0", part: str = ""
    ) -> str:
        """Returns the matrix descriptor of the part of a tile that k-step kk of a wgmma multiplies.

        place  C expression of its first row, or of its panel across the reduction.
        """
        k = self.block.parts.reduction
        at, step = f"shared.{name}[stage.index]{part}", STEP_BYTES // k.itemsize
        if not side.along_k:
            channels = side.width if isinstance(side, MappedOperand) else 0
            if 0 < channels < GROUP_ROWS and place != "0":
                place = f"{place} * {GROUP_ROWS // channels}"
            width = (channels or panel_size(size, k.itemsize)) * k.itemsize
            return f"matrix_descriptor<{width}>({at}[{place}][kk * {step}], {k.panel * width}, {8 * width})"
        if k.per_stage == 1:
            return f"matrix_descriptor<{k.row}>(&{at}[{place}][kk * {step}], 16, {8 * k.row})"
        width = k.panel * k.itemsize
        if width == 16:
            return f"matrix_descriptor<0>({at}[kk * 2][{place}], {size * 16}, 128)"
        steps = width // 32
        panel, inside = (f"kk / {steps}", f"kk % {steps} * {step}") if steps > 1 else ("kk", "0")
        return f"matrix_descriptor<{width}>(&{at}[{panel}][{place}][{inside}], 16, {width * 8})"


class StageSums(MainLoop):
    """Products whose sums of each stage threads add to the tile's, while the other consumers multiply."""

    def begin_tile(self) -> None:
        count = self.block.columns // 2
        self.w.line(f"float sum[{count}] = {{}}, part[{count}];  // of a tile, and of one stage of it")

    def stage(self, first: str) -> None:
        self._multiply("part", "kk > 0")
        await_products(self.w)
        self.w.line("wgmma_hold(part);")
        self.ring.release()
        self.w.reads("part")
        self.w.unrolled_line(f"for (int i = 0; i < {self.block.columns // 2}; ++i) sum[i] += part[i];")

    def end_tile(self) -> None:
        pass


class ScaledSums(StageSums):
    """The same of codes: the sums of a stage are multiplied by the factors of their rows and columns.

    Factors are read before the products begin, all of whose threads are then done with them when one of them releases
    the stage.  Where each column has a factor of its own these are too many: they are read behind the products, and
    threads wait for each other.

    Of two consumers the second one begins when the first one has its first sums: from then on one multiplies sums by
    factors while the tensor cores work for the other.  If they began together, nothing would keep them apart.
    """

    def __init__(self, block: Block, types: tuple[str, str]) -> None:
        super().__init__(block, types)
        a, b, columns = block.parts.a, block.parts.b, block.columns
        assert isinstance(a, ScaledOperand)
        assert isinstance(b, ScaledOperand)
        self._of_row = "shared.a_scale[stage.index][row + i * 8]" if a.factors else ""
        #: columns that have one factor
        self._shared = b.factors.together(columns) if b.factors else columns
        self._of_column = "shared.b_scale[stage.index][j]" if b.factors else ""

    def begin(self) -> None:
        if self.s.groups == 2:
            self.w.line("bool begins = true;  // consumer 1 begins when consumer 0 has its first sums")

    def _multiply(self, sums: str, adds: str) -> None:
        barrier = f"({self.s.groups + 2}, {2 * GROUP})"  # behind those of the consumers, and of a cluster's sums
        if self.s.groups == 2:
            self.w.line(f"if (begins && group == 1) named_barrier_sync{barrier};")
        super()._multiply(sums, adds)
        await_products(self.w)
        if self.s.groups == 2:
            self.w.line(f"if (begins && group == 0) named_barrier_arrive{barrier};")
            self.w.line("begins = false;")

    def stage(self, first: str) -> None:
        if self._shared == 1:
            self._stage_of_columns()
            return
        w, columns = self.w, self.block.columns
        count = columns // self._shared
        several = count > 1
        w.line(f"float scale{f'[{count}]' if several else ''}[2];")
        with w.repeated("j", count):
            column = self._of_column if several else self._of_column.replace("[j]", "[0]")
            text = " * ".join(filter(None, (self._of_row, column)))
            with w.unrolled("for (int i = 0; i < 2; ++i)"):
                w.line(f"scale{'[j]' if several else ''}[i] = {text};")
        self._multiply("part", "kk > 0")
        w.line("wgmma_hold(part);")
        self.ring.release()
        w.reads("part")
        of = f"[i / {self._shared // 2}]" if several else ""
        w.unrolled_line(f"for (int i = 0; i < {columns // 2}; ++i) sum[i] += part[i] * scale{of}[i / 2 % 2];")

    def _stage_of_columns(self) -> None:
        w, row = self.w, bool(self._of_row)
        if row:
            w.line("float row_scale[2];")
            w.unrolled_line(f"for (int i = 0; i < 2; ++i) row_scale[i] = {self._of_row};")
        self._multiply("part", "kk > 0")
        w.line("wgmma_hold(part);")
        w.reads("part")
        with w.unrolled(f"for (int j = 0; j < {self.block.columns // 8}; ++j)"):
            w.line("const auto scale = load_shared<2>(&shared.b_scale[stage.index][j * 8 + lane % 4 * 2]);")
            text = f"scale[i % 2]{' * row_scale[i / 2]' if row else ''}"
            w.unrolled_line(f"for (int i = 0; i < 4; ++i) sum[j * 4 + i] += part[j * 4 + i] * ({text});")
        self.block.synchronize("all have read the factors")
        self.ring.release()


class SplitSums(StageSums):
    """The same of operands that are split: six products of their parts.

    The parts of A come to registers first: wgmma would read each of them from shared memory up to three times.
    """

    def __init__(self, block: Block, types: tuple[str, str]) -> None:
        super().__init__(block, types)
        assert isinstance(block.parts.a, TilePath)
        self._along = block.parts.a.along_k

    def begin(self) -> None:
        at, row = "fragment_at<bfloat16, 64>", linear([(self.block.rows, 1), ("t / 32", 16)])
        if not self._along:
            at, row = "fragment_at_across", "t / 32 * 16"
        self.w.line(f"const int place = {at}({row});  // of a lane's part of the fragments of operand A")

    def begin_tile(self) -> None:
        super().begin_tile()
        self.w.line(f"uint32 fragment[{PARTS}][{self.block.parts.reduction.steps}][4];")

    def _multiply(self, sums: str, adds: str) -> None:
        w, block, along = self.w, self.block, self._along
        tile = "shared.a[stage.index][part]" + ("" if along else f"[{block.group}]")
        load, at = ("", "(place ^ kk * 32)") if along else ("_transposed", "place + kk * 2048")
        with w.unrolled(f"for (int part = 0; part < {PARTS}; ++part)"), self._steps():
            w.line(f"const auto tile = reinterpret_cast<const unsigned char*>({tile});")
            w.line(f"load_matrices{load}(fragment[part][kk], tile + {at});")
        across = "" if block.parts.b.along_k else ", 1"
        with products(w, sums, (self.ring, "stage")):
            for number, some in enumerate((SMALL, LARGE)):
                with self._steps():
                    for a, b in some:
                        first = not number and (a, b) == some[0]
                        w.line(f"{self.wgmma}{across}>(")
                        of_b = self._descriptor(block.parts.b, "b", block.columns, part=f"[{b}]")
                        w.line(f"    {sums}, fragment[{a}][kk], {of_b}, {adds if first else 'true'});")


class ComputedProducts(MainLoop):
    """Products whose operand A is computed: each fragment while the one before is multiplied."""

    def __init__(self, block: Block, types: tuple[str, str], operand_a: OperandAWriter) -> None:
        super().__init__(block, types)
        self._a, self.rolled = operand_a, False

    def begin(self) -> None:
        self._a.begin()

    def begin_tile(self) -> None:
        super().begin_tile()
        self._a.begin_tile()

    def stage(self, first: str) -> None:
        w, b = self.w, self.block.parts.b
        self._a.begin_stage()
        with w.unrolled("for (int kk = 0; kk < 4; ++kk)"):
            self._a.fragment()
            with products(w, "sum", (self.ring, "stage")):
                w.line(f"{self.wgmma}{'' if b.along_k else ', 1'}>(")
                w.line(f"    sum, part[kk % 2], {self._descriptor(b, 'b', self.block.columns)},")
                w.line(f"    k > {first} || kk > 0);")
            await_products(w, 1, "the product before is done: its fragment, and at first its stage, are free")
            self.ring.release("previous", condition=f"kk == 0 && k > {first} && t == 0", at="previous")
        w.line("previous = stage.index;")
        w.moved("stage", "previous")


class SparseProducts(MainLoop):
    """Products whose operand A has two of every four terms: each thread reads which they are, of all of a stage.

    These metadata lie in registers that the tensor cores read while products run, so that a stage's products are done
    before the next one's metadata are read; meanwhile the tensor cores work for the other consumers.
    """

    def begin_tile(self) -> None:
        self._declare_sums()

    def stage(self, first: str) -> None:
        self._multiply(self.block.sum, f"k > {first} || kk > 0")
        await_products(self.w, note="nothing is written to the metadata before")
        self.ring.release()

    def end_tile(self) -> None:
        pass

    def _multiply(self, sums: str, adds: str) -> None:
        w, block, k = self.w, self.block, self.block.parts.reduction
        place = block.rows.removesuffix(f" * {GROUP_ROWS}")
        w.writes("kept")
        w.line(f"uint32 kept[{self.s.pieces}];  // the metadata of a thread")
        with block.pieces():
            at = "p" if self.s.pieces > 1 else "0"
            w.line(f"kept[{at}] = sparse_metadata(shared.metadata[stage.index][{place}][t]);")
        step, name = STEP_BYTES // k.itemsize, self.wgmma.replace("wgmma<", "wgmma_sparse<")
        with products(w, sums.partition("[")[0], (self.ring, "stage"), registers="kept"):
            for kk in range(k.steps):
                a = f"&shared.a[stage.index][{block.rows}][{kk * step}]"
                b = f"&shared.b[stage.index][0][{2 * kk * step}]"
                with block.pieces():
                    w.line(f"{name}, {kk}>(")
                    w.line(f"    {sums}, matrix_descriptor<{k.row // 2}>({a}, 16, {4 * k.row}),")
                    of_b = f"matrix_descriptor<{k.row}>({b}, 16, {8 * k.row})"
                    first = adds.partition(" || kk > 0")[0]
                    w.line(f"    {of_b}, kept[{at}], {'true' if kk else first});")


def main_loop(block: Block, types: tuple[str, str], operand_a: OperandWriter) -> MainLoop:
    """Returns what a consumer does with a stage."""
    if isinstance(operand_a, OperandAWriter):
        return ComputedProducts(block, types, operand_a)
    if block.parts.reduction.sparse:
        return SparseProducts(block, types)
    if types[0] == BF16X6:
        return SplitSums(block, types)
    if block.s.scales:
        return ScaledSums(block, types)
    return (StageSums if adds_up_stages(block.spec, block.s) else MainLoop)(block, types)


class Turns:
    """The turns of two ping-pong consumers: one multiplies while the other works on its sums."""

    def __init__(self, block: Block) -> None:
        self._w, self._signals = block.w, Signals(block.w, "turn", 2)

    def begin(self) -> None:
        self._w.line("uint32 turn = 1 - group;  // consumer 0 begins: the phase before the first counts as completed")

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Writes the wait for a consumer's turn, and its end."""
        self._signals.wait("group", "turn")
        self._w.line("turn ^= 1;")
        yield
        self._signals.arrive("1 - group", condition="t == 0", note="the stages that follow are the other's")


def consumer(loop: MainLoop, turns: Turns | None, results: Results) -> None:
    """Writes what a warpgroup does that multiplies: the loop over its tiles."""
    block, w, s = loop.block, loop.w, loop.s
    w.line(f"registers_increase<{block.layout.registers[1]}>();")
    w.line(f"const int t = threadIdx.x % {GROUP}, lane = t % 32;")
    row = linear([("0" if s.pieces > 1 else block.rows, 1), ("t / 32 * 16", 1), ("lane / 4", 1)])
    place = f"of {GROUP_ROWS} rows" if s.pieces > 1 else "in the tile"
    w.line(f"const int row = {row};  // of a thread's first result {place}")
    w.line(f"Ring<{s.stages}> stage;")
    results.epilogue.scalars()
    if results.totals:
        results.totals.add_up()
        block.synchronize()
        results.totals.finish()
        block.synchronize()
    loop.begin()
    results.begin()
    first, last = block.stages()
    if turns:
        turns.begin()
    with block.tiles(in_turn=turns is not None):
        if block.phased:
            results.batch_coordinates()
            first, last = block.stages_of_phase()
        results.bring_operands()
        loop.begin_tile()
        with turns.taken() if turns else nullcontext():
            if loop.rolled:
                w.line("#pragma unroll 1")
            with w.loop(f"for (int k = {first}; k < {last}; ++k, ++stage)"):
                block.ring.wait()
                loop.stage(first)
        loop.end_tile()
        w.line()
        w.reads("sum")
        with results.sums_of_cluster():
            results.write()
    results.end()
