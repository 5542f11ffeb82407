"""Results of the Hopper kernels that leave through shared memory, a chunk of columns at a time.

TMA copies them out, to where operands as large as the results may lie before; or threads carry them, where no tensor
map describes an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from codegen.arch import LINE_BYTES
from codegen.buffers import guard
from codegen.contraction.totals import Totals
from codegen.contraction.wgmma_block import Block, tidy
from codegen.contraction.wgmma_layout import GROUP, GROUP_ROWS, STAGING, Layout
from codegen.contraction.wgmma_partials import WgmmaPartials
from codegen.contraction.wgmma_results import ChunkedResults, DirectResults, Results
from codegen.epilogue import Epilogue
from codegen.expr import Operand
from codegen.iteration import extent, linear, unsigned
from codegen.pipeline import Signals
from codegen.tensor_map import box_bytes

#: Where accesses would be shorter than so many bytes, it takes fewer of them if most have 16 aligned bytes and the rest
#: one element.
SHORT = 8
#: Loads of operands that a thread has in flight, and its stores of results.
FETCHED, CARRIED = 8, 4
#: Bytes of an asynchronous copy at least.
LEAST_COPY = 4


class StagedResults(ChunkedResults):
    """Results that go through buffers in shared memory."""

    #: which part of a consumer's buffers a chunk has
    step, buffer = ", buffer ^= 1", "[buffer]"

    def __init__(self, block: Block, epilogue: Epilogue, partials: WgmmaPartials, totals: Totals) -> None:
        super().__init__(block, epilogue, partials, totals)
        self.staged = [self.w.names.unique(op.name, "_out") for op in self.layout.stores]
        #: what lies in a buffer before the results take its place: loads of the program, and the buffer's output
        self.held: dict[int, int] = {}

    def begin(self) -> None:
        self.w.line("int buffer = 0;")

    def begin_chunk(self) -> None:
        if self.block.n.ragged:
            self.w.line(f"if ({self.n0} + chunk * {self.layout.chunk} >= {self.block.n.total}) break;")
        self.acquire()

    def acquire(self) -> None:
        """Writes the wait until a chunk's buffer is free: what the warps left of the one before has been read."""
        if self.partials.rows:
            super().begin_chunk()

    def make(self) -> None:
        w, layout = self.w, self.layout
        values = [w.names.unique(op.name, "_v") for op in layout.stores]
        for name, op in zip(values, layout.stores):
            w.line(f"Vector<{op.dtype.ctype}, 2> {name}[4];")
        with w.unrolled("for (int f = 0; f < 4; ++f)"):
            place, absent = self._row("row + f % 2 * 8", held=True)
            w.leave(*absent)
            self._column(f"{self.column} + f / 2 * 8", held=self.block.n.ragged)
            run = self._run(self._held_element)  # an extra result in the buffer does no harm
            sinks = self.partials.sinks(self.pair, outside=True, chunk=self.column)
            pairs = self._held_pairs()
            vectors = [f"{v}[f]" for v in values]
            self.epilogue.results([*place, "n"], self._sums(self.element), run, vectors, sinks, pairs)
        store = f"store_fragments_turned<{GROUP_ROWS}>" if layout.turned else f"store_fragments<{layout.chunk}>"
        for name, value in zip(self.staged, values):
            w.line(f"{store}({self._tile(name)}, t / 32 * 16, j, {value});")

    def _tile(self, name: str) -> str:
        """Returns the C expression of a chunk's buffer."""
        return f"&shared.{name}[{self.block.group}]{self.buffer}[0][0]"

    def _held_pairs(self) -> dict[int, str]:
        """Writes the reads of a thread's pairs of what lies in the buffers; returns their C names."""
        found = {}
        for n, k in self.held.items():
            found[n] = self.w.names.unique(self.layout.program.loads[n].name, "_v")
            place = "t / 32 * 16 + lane / 4 + f % 2 * 8, j + f / 2 * 8 + lane % 4 * 2"
            load = f"load_results<2, {self.layout.chunk}>"
            load = f"load_pair_turned<{GROUP_ROWS}>" if self.layout.turned else load
            pair = f"{load}({self._tile(self.staged[k])}, {place})"
            self.w.line(f"const auto {found[n]} = {pair};")
        return found


class CopiedResults(StagedResults):
    """Results that TMA copies out."""

    def __init__(self, block: Block, epilogue: Epilogue, partials: WgmmaPartials, totals: Totals) -> None:
        super().__init__(block, epilogue, partials, totals)
        self.store_maps = [self.w.names.unique(op.name, "_map") for op in self.layout.stores]
        self._m0 = f"m0 + {block.rows}".removesuffix(" + 0")

    def acquire(self) -> None:
        self.w.line(f"if (t == 0) tma_wait_read<{STAGING - 1}>();  // the copies out of this buffer have read it")
        self.block.synchronize()

    def end_chunk(self) -> None:
        """Writes how one thread has TMA copy out the results of a chunk."""
        w, group = self.w, self.block.group
        w.line("fence_async_shared();")
        self.block.synchronize()
        with w.block("if (t == 0)"):
            # A consumer whose rows lie outside commits an empty group: tma_wait_read counts groups.
            inside = self.block.m.inside(self._m0) if self.s.tile_m > GROUP_ROWS else ""
            for name, tensor_map in zip(self.staged, self.store_maps):
                w.line(f"{guard(inside)}tma_store({tensor_map}, shared.{name}[{group}][buffer], {self._box()});")
            w.line("tma_commit();")

    def end(self) -> None:
        self.w.line("if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it")

    def _box(self) -> str:
        """Returns the coordinates of a chunk of a consumer's results."""
        layout = self.layout
        batch = [name for name in self._batch if name != "0"]
        place = [f"{self.n0} + chunk * {layout.chunk}", self._m0]
        return ", ".join([*(reversed(place) if layout.turned else place), *reversed(batch)])


class ResultsOnOperands(CopiedResults):
    """Results that take the place of operands, as large as they are, which TMA brings while products run."""

    step = ""

    def __init__(self, block: Block, epilogue: Epilogue, partials: WgmmaPartials, totals: Totals) -> None:
        super().__init__(block, epilogue, partials, totals)
        self.held = {n: k for n, (k, _) in block.layout.operand_maps.items()}
        self.load_maps = {n: self.w.names.unique(self.layout.program.loads[n].name, "_map") for n in self.held}
        self._signals = Signals(block.w, "operands", block.s.groups)
        self._buffer = f"p * {self.chunks} + chunk" if block.s.pieces > 1 else "chunk"

    def begin(self) -> None:
        if self.block.persistent:
            self.w.line("uint32 brought = 0;  // the phase in which a tile's operands come")

    def bring_operands(self) -> None:
        """Writes the TMA loads of a tile's part of the operands."""
        w, block, layout, group = self.w, self.block, self.layout, self.block.group
        self.batch_coordinates()
        w.line("// What the epilogue reads comes meanwhile, to where the results will be.")
        with w.block(f"if (t == 0{f' && {block.writes}' if block.writes else ''})"):
            if block.persistent:
                w.line("tma_wait_read<0>();  // the copies of the results before have read it")
            outputs = [layout.arrays[f"out{k}"] for k in self.held.values()]
            self._signals.expect(sum(x.bytes for x in outputs) // self.s.groups, group)
            with block.pieces(), w.unrolled(f"for (int chunk = 0; chunk < {self.chunks}; ++chunk)"):
                for n, (k, described) in layout.operand_maps.items():
                    tile = f"shared.{self.staged[k]}[{group}][{self._buffer}]"
                    self._signals.copied(layout.chunks * box_bytes(described), group)
                    w.line(f"tma_load({tile}, {self.load_maps[n]}, {self._signals.at(group)}, {self._box()});")

    def place(self) -> None:
        """Writes the wait for the operands: where results go has been written for their loads."""
        self._signals.wait(self.block.group, "brought" if self.block.persistent else "0")
        if self.block.persistent:
            self.w.line("brought ^= 1;")

    def acquire(self) -> None:
        self.w.line(f"const int buffer = {self._buffer};")
        StagedResults.acquire(self)


class CarriedResults(StagedResults):
    """Results that a consumer's threads carry out: neighbouring threads write neighbours in memory.

    A barrier of the chunk in between tells that a buffer has been read.
    """

    def end_chunk(self) -> None:
        self.block.synchronize()
        for name, pointer, op in zip(self.staged, self.epilogue.pointers.stores, self.layout.stores):
            self._carry(name, pointer, op)

    def accesses(self, lanes: int) -> tuple[str, str]:
        """Returns the loop over a thread's accesses to a buffer, ``lanes`` to a row of it, and the row of each."""
        return f"for (int i = t; i < {GROUP_ROWS * lanes}; i += {GROUP})", f"i / {lanes}"

    def _carry(self, name: str, pointer: str, op: Operand) -> None:
        """Writes the stores of a chunk of an output."""
        w, chunk = self.w, self.layout.chunk
        vector = self.vector(op)
        loop, row = self.accesses(chunk // vector)
        w.line("#pragma unroll 4")
        with w.block(loop):
            place, absent = self.carried(row, tidy(f"i % {chunk // vector} * {vector}"))
            w.leave(*self.beyond_m, *self.beyond_n, *absent)
            to = f"{pointer} + {linear(list(zip(place, op.strides)))}"
            w.line(f"store({to}, load_results<{vector}, {chunk}>({self._tile(name)}, r, c));")

    def carried(self, row: str, column: str = "", *, held: bool = False) -> tuple[list[str], list[str]]:
        """Writes a consumer's row r and its chunk's column n; returns what `_row` returns, the column included."""
        self.w.line(f"const int r = {row}{f', c = {column}' if column else ''};")
        place, absent = self.row_of_group(held=held)
        self.w.line(f"const {self.t} n = {self.n0} + chunk * {self.layout.chunk}{' + c' if column else ''};")
        return [*place, "n"], absent

    def row_of_group(self, *, held: bool = False) -> tuple[list[str], list[str]]:
        """Returns what `_row` returns for a consumer's row r."""
        tall = self.s.pieces > 1 or self.s.groups == 1
        return self._row("r" if tall else f"{self.block.rows} + r", held=held)

    def vector(self, op: Operand) -> int:
        """Returns how many elements every access to an operand can have at aligned addresses."""
        turned = self.layout.turned
        along = len(self.layout.batch) + len(self.layout.rows) - turned
        size = self.layout.rows[-1] if turned else self.parts.cols
        vector = min(16 // op.dtype.itemsize, GROUP_ROWS if turned else self.layout.chunk)
        while vector > 1 and (size % vector or not self.epilogue.wide(op, vector, along)):
            vector //= 2
        return vector


class ResultsCarriedTurned(CarriedResults):
    """Results that are neighbours along columns: rows of the buffers, which a consumer's threads carry out.

    Operands as large as the results that lie alike come the same way, to the buffer of an output with elements of the
    same type: results take the place of what was read.  Asynchronous copies bring them a chunk ahead, those of the
    first one while products run, unless their accesses are too short.
    """

    def __init__(self, block: Block, epilogue: Epilogue, partials: WgmmaPartials, totals: Totals) -> None:
        super().__init__(block, epilogue, partials, totals)
        loads = self.layout.program.loads
        self.held = taking_places(
            self.layout, [n for n, op in enumerate(loads) if op.strides[-2] == 1 and op.strides[-1]]
        )
        copied = all(self.vector(loads[n]) * loads[n].dtype.itemsize >= LEAST_COPY for n in self.held)
        self._ahead = bool(self.held) and copied
        self._early = self._ahead and self.s.pieces == self.s.split_k == 1 and not block.phased

    def bring_operands(self) -> None:
        if self._early:
            self.batch_coordinates()
            self.w.line("// What the epilogue reads first comes meanwhile, to where the results will be.")
            self._fetch("0", "buffer")

    def place(self) -> None:
        if not self._early:
            super().place()

    @contextmanager
    def _pieces(self) -> Iterator[None]:
        with super()._pieces():
            if self._ahead and not self._early:
                self._fetch("0", "buffer")
            yield

    def acquire(self) -> None:
        if not self._ahead:
            super().acquire()
            if self.held:
                self._fetch("chunk", "buffer")
                self.block.synchronize()
            return
        self.w.line("copy_async_wait<0>();")
        self.block.synchronize("operands have come, and the other buffer has been read")
        more = f"{self.n0} + (chunk + 1) * {self.layout.chunk}" if self.block.n.ragged else ""
        if self.chunks > 1:
            with self.w.guarded(f"chunk + 1 < {self.chunks}", self.block.n.inside(more)):
                self._fetch("(chunk + 1)", "buffer ^ 1")

    def _fetch(self, chunk: str, buffer: str) -> None:
        """Writes the loads of a chunk's operands to a buffer."""
        for n, k in self.held.items():
            op, pointer = self.layout.program.loads[n], self.epilogue.pointers.loads[n]
            tile = f"&shared.{self.staged[k]}[{self.block.group}][{buffer}][0][0]"
            with self._runs(op, FETCHED, chunk, held=True) as (vector, offset):
                if self._ahead:
                    self.w.line(f"copy_row<{vector}, {GROUP_ROWS}>({tile}, c, r, {pointer} + {offset});")
                else:
                    self.w.line(f"const auto v = load<{vector}>({pointer} + {offset});")
                    self.w.line(f"store_row<{GROUP_ROWS}>({tile}, c, r, v);")
        if self._ahead:
            self.w.line("copy_async_commit();")

    def _carry(self, name: str, pointer: str, op: Operand) -> None:
        with self._runs(op, CARRIED) as (vector, offset):
            self.w.line(f"store({pointer} + {offset}, load_results<{vector}, {GROUP_ROWS}>({self._tile(name)}, c, r));")

    @contextmanager
    def _runs(
        self, op: Operand, unrolled: int, chunk: str = "chunk", *, held: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Writes the loop over a thread's accesses to an operand, each of some rows r of a column c of a chunk.

        Yields how many rows, and the C expression of where they lie.  With ``held``, columns that do not exist are the
        last one instead.
        """
        w, vector = self.w, self.vector(op)
        lanes = GROUP_ROWS // vector
        with w.block(""):
            w.line(f"const int r = {tidy(f't % {lanes} * {vector}')};")
            place, _ = self.row_of_group()
            with w.guarded(self.block.m.inside("m")):
                w.line(f"#pragma unroll {unrolled}")
                with w.block(f"for (int c = t / {lanes}; c < {self.layout.chunk}; c += {GROUP // lanes})"):
                    n = linear([(self.n0, 1), (chunk, self.layout.chunk), ("c", 1)])
                    w.line(f"const {self.t} n = {self.block.n.held(n) if held else n};")
                    w.leave(*([] if held else self.beyond_n))
                    yield vector, linear(list(zip([*place, "n"], op.strides)))


class ResultsCarriedByWarps(CarriedResults):
    """Results of which each warp carries out its own rows: it need not wait for the others.

    Operands as large as the results whose rows begin anywhere, or are not all there, are fetched the same way, to the
    buffer of an output with elements of the same type: results take the place of what was read.
    """

    step = buffer = ""

    def __init__(self, block: Block, epilogue: Epilogue, partials: WgmmaPartials, totals: Totals) -> None:
        super().__init__(block, epilogue, partials, totals)
        loads = self.layout.program.loads
        scattered = [n for n, op in enumerate(loads) if self._anywhere(op) or block.spec.results]
        self.held = taking_places(self.layout, [n for n in scattered if loads[n].strides[-1] == 1])
        self._early = bool(self.held) and not (block.phased or block.spec.results)

    def begin(self) -> None:
        pass  # there is one buffer

    def bring_operands(self) -> None:
        if not self._early:
            return
        w, columns = self.w, self.chunks * self.layout.chunk
        self.batch_coordinates()
        w.line("// What the epilogue reads comes to the L2 cache meanwhile.")
        with self.block.pieces():
            for n in self.held:
                op = self.layout.program.loads[n]
                each = LINE_BYTES // op.dtype.itemsize
                lines = -(-columns // each) + 1  # rows begin anywhere in one
                with w.block(f"for (int i = t; i < {GROUP_ROWS * lines}; i += {GROUP})"):
                    w.line(f"const int r = i / {lines};")
                    place, _ = self.row_of_group(held=True)
                    at = f"{self.n0} + min(i % {lines} * {each}, {columns - 1})"
                    w.line(f"const {self.t} n = {self.block.n.held(at)};")
                    to = linear(list(zip([*place, "n"], op.strides)))
                    w.line(f"prefetch({self.epilogue.pointers.loads[n]} + {to});")

    def place(self) -> None:
        if not self._early:
            super().place()

    def acquire(self) -> None:
        """Writes the wait for the warp's buffer, and the loads of its rows of operands."""
        w, chunk = self.w, self.layout.chunk
        w.line("__syncwarp();  // the warp has carried out what the buffer held")
        for n, k in self.held.items():
            op, unsigned_ = self.layout.program.loads[n], unsigned(self.t)
            lanes = chunk * op.dtype.itemsize // 16
            loop, row = self.accesses(lanes)
            w.line("#pragma unroll 4")
            with w.block(loop):
                place, absent = self.carried(row, held=True)
                w.leave(*absent)
                at = f"{unsigned_}({linear(list(zip(place, op.strides)))})"
                size = f"{unsigned_}({extent(self.layout.over.space, op.strides)})"
                source = f"{self.epilogue.pointers.loads[n]}, {at}, {size}"
                w.line(f"fetch_row<{chunk}>({self._tile(self.staged[k])}, r, {source}, i % {lanes});")
        if self.held:
            w.line("__syncwarp();")

    def end_chunk(self) -> None:
        self.w.line("__syncwarp();  // a warp carries out its own rows")
        for name, pointer, op in zip(self.staged, self.epilogue.pointers.stores, self.layout.stores):
            (self._carry_anywhere if self._anywhere(op) else self._carry)(name, pointer, op)

    def accesses(self, lanes: int) -> tuple[str, str]:
        return f"for (int i = lane; i < {GROUP_ROWS // 4 * lanes}; i += 32)", f"t / 32 * 16 + i / {lanes}"

    def _anywhere(self, op: Operand) -> bool:
        """Tells whether rows begin anywhere in memory, and are carried as they lie there."""
        return self.vector(op) * op.dtype.itemsize < SHORT

    def _carry_anywhere(self, name: str, pointer: str, op: Operand) -> None:
        """Writes how rows are carried that begin anywhere: most of them 16 aligned bytes at a time, then their ends."""
        w, chunk, cols = self.w, self.layout.chunk, self.parts.cols
        lanes = chunk * op.dtype.itemsize // 16
        left = f"{cols} - n" if self.t == "int32" else f"int({cols} - n)"
        count = f"min({chunk}, {left})" if self.block.n.ragged else str(chunk)
        loop, row = self.accesses(lanes)
        w.line("#pragma unroll 4")
        for head, function, r, part in (
            (loop, "carry_row", row, f"i % {lanes}"),
            ("", "carry_end", "t / 32 * 16 + lane / 2", "lane % 2"),
        ):
            with w.block(head):
                place, absent = self.carried(r)
                outside = " || ".join([*self.beyond_m, *absent])
                unless = guard(f"!({outside})" if outside else "")
                to = f"{pointer} + {linear(list(zip(place, op.strides)))}"
                w.line(f"{unless}{function}<{chunk}>({to}, {self._tile(name)}, r, {count}, {part});")


def taking_places(layout: Layout, loads: Iterable[int]) -> dict[int, int]:
    """Returns which of some loads of the program are as large as the results, each with the output in whose buffers it
    may lie: one with elements of the same type, which no other has.
    """
    found: dict[int, int] = {}
    for n in loads:
        op = layout.program.loads[n]
        free = [k for k, out in enumerate(layout.stores) if out.dtype == op.dtype and k not in found.values()]
        if free and layout.over.by_row(op):
            found[n] = free[0]
    return found


def results(block: Block, epilogue: Epilogue, partials: WgmmaPartials, totals: Totals) -> Results:
    """Returns what writes the results."""
    layout = block.layout
    kind: type[Results] = ResultsOnOperands if layout.operand_maps else CopiedResults
    if layout.maps is None and layout.carried:
        kind = ResultsCarriedByWarps if layout.by_warps else ResultsCarriedTurned if layout.turned else CarriedResults
    elif layout.maps is None:
        kind = ChunkedResults if partials.rows else DirectResults
    return kind(block, epilogue, partials, totals)
