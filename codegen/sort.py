"""The sort family: rows sorted along one dimension, with pointwise work before and after.

Elements are words of a key and a position (`device/sort.cuh`).  Each thread of a row sorts some of them in registers,
and the threads merge theirs in shared memory.  Rows that are too long for a block are sorted in runs, which further
kernels merge, two at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from codegen.buffers import Buffer, Edge
from codegen.declined import Declined
from codegen.dtypes import SIZE_OF
from codegen.expr import Emitter, Load, Operand, Program, Reduced, Result, Store, Value, ctype_of
from codegen.family import Family, Form, Schedule
from codegen.iteration import Coordinates, bounds, index_type, merge_outer
from codegen.kernel import Kernel, Pointers, locate, parameter, row_number
from codegen.sizes import most
from codegen.spec import KernelSource, KernelSpec
from codegen.target import Target

#: Words that a thread sorts by itself, and threads of a block that merges two runs.
ITEMS, MERGING = 8, 256
#: Threads of a block that has several rows, and most bytes of words that a block sorts.
THREADS, MOST_BYTES = 256, 32 << 10


@dataclass(frozen=True)
class SortSpec(KernelSpec):
    """Rows sorted along a dimension, whole or in runs: pieces of a row that are in order each by themselves.

    The program's reductions are over the value that rows are sorted by.  They give that value in its sorted place or,
    with ``at``, the position along the row, an int32, that it comes from.  NaN counts as the largest value; equal ones
    stay in the order of their positions.

    outer, length  sizes of the other dimensions, and of this one, which is the last of the program's space.
    count          the elements of a row that are sorted: ``length``, or as many as ``order`` has.
    run            how many of them are a run, the last one having what is left; at most ``longest`` unless merged.
    keep           how many of each run are written, one run behind the other: the program's space has so many there
                   where it depends on a reduction, or is stored.
    descending     whether the largest come first.
    merged         whether each run consists of two that are in order already, the first of ``run / 2``.
    order          None, or where positions along the row are read from: its strides are over the program's space.
    """

    outer: tuple[int, ...]
    length: int
    count: int
    run: int
    keep: int
    descending: bool
    program: Program
    merged: bool = False
    order: Operand | None = None

    @property
    def runs(self) -> int:
        """How many runs a row has."""
        return -(-self.count // self.run) if self.count else 0


@dataclass(frozen=True)
class SortSchedule(Schedule):
    """How a sort is mapped to threads.

    items  elements that a thread sorts by itself, or merges.
    lanes  threads of a run, a power of two; of a block if runs are merged.
    itype  C type of positions and offsets.
    """

    items: int
    lanes: int
    itype: str

    @property
    def rows(self) -> int:
        """How many runs a block sorts."""
        return max(1, THREADS // self.lanes)


def word_bytes(ctype: str) -> int:
    """Returns how many bytes a word has whose key is made of a compute type."""
    return 16 if SIZE_OF.get(ctype, 1) > 4 else 8


def longest(ctype: str) -> int:
    """Returns how many elements of a compute type one block sorts at most."""
    return MOST_BYTES // word_bytes(ctype)


def normalize(spec: SortSpec) -> SortSpec:
    """Returns the spec with neighbouring outer dimensions merged, in memory order."""
    order = spec.order
    outer, program, strides = merge_outer(spec.program, spec.outer, [] if order is None else [order.strides])
    return replace(spec, outer=outer, program=program, order=order and replace(order, strides=strides[0]))


def schedules(spec: SortSpec, target: Target) -> Iterator[SortSchedule]:
    """Yields schedules worth trying, best guess first."""
    space = normalize(spec)
    operands = [*space.program.operands, *([] if space.order is None else [space.order])]
    itype = index_type(*bounds(operands, (*space.outer, max(space.length, space.count))))
    if spec.merged:
        yield SortSchedule(ITEMS, MERGING, itype)
        return
    size = min(spec.run, spec.count)
    most = min(ITEMS, 1 << (max(size, 1) - 1).bit_length())
    for items in (most, max(1, most // 2)):
        needed = max(1, -(-size // items))
        lanes = 1 << (needed - 1).bit_length()
        if lanes <= 1024:  # threads of a block
            yield SortSchedule(items, lanes, itype)


class _Renderer:
    def __init__(self, spec: SortSpec, schedule: SortSchedule) -> None:
        self.spec, self.s = normalize(spec), schedule
        self.program = self.spec.program
        #: what rows are sorted by
        self.key = self.program.reductions[0].value
        self.w = Kernel(spec.name)
        self.names = self.w.names
        self.pointers = Pointers(self.program, self.names)
        self.order = None if spec.order is None else self.names.unique(spec.order.name)
        self.emitter = Emitter(self.program, self.names)
        #: writes how a sorted element is computed, besides what else is computed there
        self.again = Emitter(self.program, self.names)
        self.before = self.program.needed([self.key])
        self.after = self.program.needed([store.value for store in self.program.stores])
        self.word = "sort::Wide" if word_bytes(ctype_of(self.program, self.key)) == 16 else "uint64"

    # ---- the kernel

    def render(self) -> KernelSource:
        w, s, spec, program = self.w, self.s, self.spec, self.program
        if not spec.merged and s.lanes * s.items < min(most(spec.run), most(spec.count)):
            raise Declined(f"{s.lanes} threads of {s.items} elements do not hold a run of {spec.run}")
        rows, threads = prod(spec.outer), s.lanes if spec.merged else s.lanes * s.rows
        w.parameters += self._parameters()
        made = self._merged(rows) if spec.merged else self._sorted(rows)
        blocks = made if spec.keep else 0
        return w.source(program, [self._detail(rows)], blocks=blocks, threads=threads, barriers=s.lanes > 1)

    def _detail(self, rows: int) -> str:
        spec, s = self.spec, self.s
        which = "largest" if spec.descending else "smallest"
        kept = f", the {spec.keep} {which} of each kept" if spec.keep < spec.run else f", the {which} first"
        runs = f" in runs of {spec.run}" if spec.runs > 1 else ""
        how = "merged" if spec.merged else "sorted"
        return f"{rows} rows of {spec.count} elements, {how}{runs}{kept}; {s.items} elements a thread"

    def _parameters(self) -> list[str]:
        found = self.pointers.parameters()
        if self.spec.order is not None and self.order is not None:  # behind the other reads
            at = len(found) - len(self.program.stores)
            found.insert(at, parameter(self.spec.order, self.order))
        return found

    def _words(self, count: int) -> None:
        self.w.line(Buffer("words", self.word, (count + count // 16,)).static)

    def _row_dimensions(self) -> None:
        """Writes coordinates of the row."""
        order = [] if self.spec.order is None else [self.spec.order.strides]
        rows = Coordinates(self.w, "row", self.spec.outer, self.s.itype, "row")
        self.rows = rows.write([*self.program.strides, *order])

    # ---- runs that a block sorts

    def _sorted(self, rows: int) -> int:
        w, s, spec = self.w, self.s, self.spec
        itype, several = s.itype, spec.runs > 1
        runs = Edge(rows * spec.runs, s.rows)
        self._words(s.lanes * s.rows * s.items)
        row_number(w, itype, "part" if several else "row", runs, s.lanes)
        if several:
            w.line(f"const {itype} row = part / {spec.runs};")
        self._row_dimensions()
        count = str(spec.count)
        if several:
            w.line(f"const {itype} first = part % {spec.runs} * {spec.run};")
            count = str(spec.run)
            if spec.count % spec.run:
                w.line(f"const {itype} count = min({itype}({spec.run}), {spec.count} - first);")
                count = "count"
        self._read(count)
        kept = str(min(spec.keep, spec.run, spec.count))
        w.line(f"sort::lanes<{s.lanes}>(own, words, {kept});")
        if count == "count":
            kept = f"min({itype}({kept}), count)" if int(kept) > spec.count % spec.run else kept
        start, step = ("lane", f"rank += {s.lanes}") if s.lanes > 1 else ("0", "++rank")
        loop = f"for ({itype} rank = {start}; rank < {kept}; {step})"
        with w.guarded("inside" if runs.ragged else ""), w.block(loop):
            row = f"threadIdx.x{f' / {s.lanes}' if s.lanes > 1 else ''}"
            mine = f"{row} * {s.lanes * s.items} + " if s.rows > 1 else ""
            w.line(f"const {itype} at = sort::position(words[sort::place({mine}rank)]);")
            self._results(f"part % {spec.runs} * {spec.keep} + rank" if several else "rank")
        return runs.tiles

    def _read(self, count: str) -> None:
        """Writes the reads of the thread's words; those past the end of a run come last."""
        w, s, spec = self.w, self.s, self.spec
        w.line(f"{self.word} own[{s.items}];")
        with w.unrolled(f"for (int e = 0; e < {s.items}; ++e)"):
            name = "i" if spec.runs > 1 or spec.order is not None else "at"
            w.line(f"const {s.itype} {name} = e{f' * {s.lanes} + lane' if s.lanes > 1 else ''};")
            whole = count.isdigit() and int(count) == s.items * s.lanes
            if not whole:
                w.line(f"own[e] = sort::last<{self.word}>();")
            with w.guarded("" if whole else f"{name} < {count}"):
                w.line(f"own[e] = {self._word(f'first + {name}' if spec.runs > 1 else name)};")

    def _word(self, entry: str) -> str:
        """Writes the reads for an element's word; returns the C expression of the word."""
        if self.spec.order is not None:
            entry = f"{self.order}[{self.rows.along(self.spec.order.strides, entry)}]"
        if entry != "at":
            self.w.line(f"const {self.s.itype} at = {entry};")
        key = f"sort::key({self._value(self.emitter, 'at')})"
        return f"sort::word({'~' if self.spec.descending else ''}{key}, at)"

    # ---- runs that are merged

    def _merged(self, rows: int) -> int:
        w, s, spec = self.w, self.s, self.spec
        itype, size = s.itype, s.lanes * s.items
        kept = min(spec.keep, spec.run)
        tiles, runs, half = -(-kept // size), spec.runs, spec.run // 2
        self._words(size)
        w.line(Buffer("bounds", "uint32", (2,)).static)
        locate(w, itype, [("row", rows, 1), ("part", runs, 1), ("tile", tiles, 1)])
        self._row_dimensions()
        given = ["0", str(half), str(spec.count)]
        if runs > 1:
            w.line(f"const {itype} first = part * {spec.run};")
            w.line(f"const {itype} middle = min(first + {half}, {itype}({spec.count}));")
            w.line(f"const {itype} last = min(first + {spec.run}, {itype}({spec.count}));")
            given = ["first", "middle", "last"]
        made = f"min(last - first, {itype}({kept}))" if runs > 1 else f"{itype}({kept})"
        begin = f"tile * {size}" if most(tiles) > 1 else "0"
        w.line(f"const {itype} begin = {begin}, end = min(begin + {size}, {made});")
        if runs > 1:
            w.line("if (begin >= end) return;")
        with w.block(f"const auto word = [&]({itype} entry)", "};"):
            w.line(f"return {self._word('entry')};")
        w.line(f"sort::runs<{s.lanes}, {s.items}>(words, bounds, word, {', '.join(given)}, begin, end);")
        with w.block(f"for ({itype} i = threadIdx.x; i < end - begin; i += {s.lanes})"):
            w.line(f"const {itype} at = sort::position(words[sort::place(i)]);")
            self._results(f"part * {kept} + begin + i" if runs > 1 else "begin + i")
        return rows * tiles * runs

    # ---- elements

    def _results(self, rank: str) -> None:
        """Writes what is computed from the element of rank ``rank`` of its row, and the stores."""
        w = self.w
        if not rank.isidentifier():
            w.line(f"const {self.s.itype} rank{'' if self.spec.merged else '_'} = {rank};")
            rank = "rank" if self.spec.merged else "rank_"
        terms = self._terms(self.after, rank, "_r")
        computed = {v for n, i in enumerate(self.program.instructions) if Result(n) in self.after for v in i.args}
        computed |= {s.value for s in self.program.stores if not self._is_copied(s)}
        for k, reduction in enumerate(self.program.reductions):
            if reduction.at is not None:
                terms[Reduced(k)] = "int32(at)"
            elif Reduced(k) in computed:
                terms[Reduced(k)] = self._value(self.again, "at", "_at")
        self.emitter.statements(w, terms, lambda k: Result(k) in self.after)
        for store, pointer in zip(self.program.stores, self.pointers.stores):
            if self._is_copied(store) and isinstance(self.key, Load):
                offset = self.rows.along(self.program.loads[self.key.operand].strides, "at")
                text = f"{self.pointers.loads[self.key.operand]}[{offset}]"
            else:
                text = self.emitter.stored(store, terms)
            w.line(f"{pointer}[{self.rows.along(store.operand.strides, rank)}] = {text};")

    def _is_copied(self, store: Store) -> bool:
        """Tells whether elements are stored as they are, bit by bit: a cast would saturate infinities of 8 bits."""
        if not isinstance(store.value, Reduced) or not isinstance(self.key, Load):
            return False
        reduction = self.program.reductions[store.value.reduction]
        return reduction.at is None and self.program.loads[self.key.operand].dtype == store.operand.dtype

    def _value(self, emitter: Emitter, position: str, suffix: str = "_e") -> str:
        """Writes the value that rows are sorted by, for the element at a position; returns the C expression."""
        terms = self._terms(self.before, position, suffix)
        emitter.statements(self.w, terms, lambda k: Result(k) in self.before)
        return emitter.term(self.key, terms)

    def _terms(self, needed: set[Value], position: str, suffix: str) -> dict[Value, str]:
        """Writes the read of one element of each load that is needed; returns the C expressions."""
        return self.pointers.read(self.w, needed, lambda strides: self.rows.along(strides, position), suffix)


FAMILY = Family("sort", SortSpec, (Form("sort", SortSchedule, schedules, lambda spec, s: _Renderer(spec, s).render()),))
