"""Pool kernels whose blocks bring what lies under a tile of windows to shared memory, and fold it there.

Every element comes from memory once a block, in vectors of neighbours, wherever rows begin; results whose neighbours in
memory other threads make, or the thread itself in other accesses, leave through shared memory likewise.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from codegen.buffers import Edge, guard
from codegen.expr import Operand, Program, Store
from codegen.iteration import coordinate, linear, unsigned
from codegen.kernel import locate
from codegen.pointwise.body import plus, read
from codegen.pool.boxes import Box, StagedSchedule, Tiles
from codegen.pool.elements import quotient
from codegen.pool.renderer import PoolRenderer
from codegen.pool.schedule import PoolSchedule
from codegen.pool.space import width
from codegen.pool.steps import THREADS
from codegen.sizes import most
from codegen.spec import KernelSource, PoolSpec
from codegen.windows import Adaptive, Covering

#: Most elements under a thread's windows that are spelled out.
SPELLED = 128


def render(spec: PoolSpec, schedule: StagedSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return StagedRenderer(spec, schedule).render()


class StagedRenderer(PoolRenderer):
    """Writes kernels whose loads and stores go through shared memory."""

    holds = False

    def __init__(self, spec: PoolSpec, schedule: StagedSchedule) -> None:
        super().__init__(spec, PoolSchedule(schedule.vector, schedule.itype, schedule.rows, schedule.cols))
        self.staged, self.tiles = schedule, Tiles(self.space, schedule)
        self.pairs = self.tiles.pairs
        #: C expressions of the tile's first position along each outer dimension, of the first element under it along
        #: each window
        self.first: list[str] = []
        self.under: list[str] = []
        self.w.parameters += self.pointers.parameters()
        self.outside = self.pointers.loads, self.pointers.stores
        self.inner_loads = {n: self.names.unique(b.operand.name, "_s") for n, b in self.tiles.loads.items()}
        #: where the boxes of the current tile's loads are
        self.places = dict(self.inner_loads)
        self.inner_stores = {n: self.names.unique(b.operand.name, "_s") for n, b in self.tiles.stores.items()}

    def render(self) -> KernelSource:
        w, tiles = self.w, self.tiles
        stages = 2 if self.staged.blocks else 1
        loads = (replace(b, stages=stages).buffer(self.inner_loads[n]) for n, b in tiles.loads.items())
        w.carve([*loads, *(b.buffer(self.inner_stores[n]) for n, b in tiles.stores.items())])
        if self.staged.blocks:
            self._in_turn()
        else:
            self._tile()
            self._bring()
            self._fold_tile("copy_async_wait<0>();")
        size = " x ".join(str(n) for n in tiles.size)
        details = f"{self._details()}, a block those of {size} positions{' in turn' if self.staged.blocks else ''}"
        blocks = self.staged.blocks or tiles.count
        return w.source(self.program, [details], blocks=blocks, threads=THREADS, barriers=True)

    def _in_turn(self) -> None:
        """Writes the loop in which a block takes tiles in turn: it brings one while it folds the one before."""
        w, blocks, tiles = self.w, self.staged.blocks, self.tiles.count
        with w.block(f"for ({self.t} tile = blockIdx.x, step = 0;; tile += {blocks}, ++step)"):
            with w.block(f"if (tile < {tiles})"):
                self._tile("tile")
                self._at_stage("step % 2")
                self._bring()
            w.line("copy_async_commit();")
            w.line("if (step == 0) continue;")
            w.line(f"const {self.t} before = tile - {blocks};")
            self._tile("before")
            self._at_stage("(step + 1) % 2")
            self._fold_tile("copy_async_wait<1>();")
            if not self.tiles.stores:
                w.line("__syncthreads();  // what comes next takes the place of this tile")
            w.line(f"if (tile >= {tiles}) break;")

    def _at_stage(self, stage: str) -> None:
        """Writes where the boxes of one of two tiles are."""
        for n, box in self.tiles.loads.items():
            self.places[n] = self.names.unique(box.operand.name, "_in")
            ctype, elements = box.operand.dtype.ctype, box.runs * box.pitch
            self.w.line(f"{ctype}* const {self.places[n]} = {self.inner_loads[n]} + {stage} * {elements};")

    def _fold_tile(self, wait: str) -> None:
        """Writes what is made of a tile that has been asked for."""
        w = self.w
        if not self.staged.blocks:
            w.line("copy_async_commit();")
        w.line(wait)
        w.line("__syncthreads();")
        self._go_inside()
        with self.scope():
            self.body()
        if self.tiles.stores:
            w.line("__syncthreads();")
        for n, box in self.tiles.stores.items():
            self._take(n, box)

    # ---- the tile

    def _tile(self, position: str = "") -> None:
        """Writes where a tile is, by its number; that of the block if none is given."""
        names = self._coordinates()
        axes = [
            (self.names.unique(f"first {name}"), edge.tiles, edge.size) for name, edge in zip(names, self.tiles.edges)
        ]
        locate(self.w, self.t, axes, position)
        self.first = [name if most(tiles) > 1 else "0" for name, tiles, _ in axes]
        self.under = []
        for k, (d, window) in enumerate(self.windows):
            if self.tiles.size[d] == self.space.outer[d]:
                self.under.append("0")
                continue
            assert not isinstance(window, Adaptive)
            covers = isinstance(window, Covering)
            at = (quotient(self.first[d], window.stride), 1) if covers else (self.first[d], window.stride)
            self.under.append(linear([at], self.tiles.shift[k]))

    def _loop(self, size: int) -> str:
        """Returns the head of the loop in which a block's threads take so many positions ``at`` in turn."""
        return f"for ({unsigned(self.t)} at = threadIdx.x; at < {size}; at += {THREADS})"

    def _split(self, box: Box) -> tuple[dict[int, str], str]:
        """Returns the C expressions of where the run of vector ``at`` is along its dimensions, and the vector in it."""
        if box.runs == 1:
            return {}, f"{self.t}(at)"
        sizes = [*(a.size for a in box.segments), box.vectors]
        places = [f"{self.t}({coordinate('at', sizes, k)})" for k in range(len(sizes))]
        return {a.dim: place for a, place in zip(box.segments, places)}, places[-1]

    def _begin(self, operand: Operand, more: dict[int, str]) -> str:
        """Returns the C expression of an offset: of the tile's first element, ``more`` positions further on."""
        origins = [*self.first, *self.under]
        terms = [(origin, step) for origin, step in zip(origins, operand.strides) if origin != "0"]
        return linear([*terms, *((text, operand.strides[d]) for d, text in more.items())])

    def _bring(self) -> None:
        """Writes the start of the copies of a tile's loads."""
        w, tiles = self.w, self.tiles
        for n, box in tiles.loads.items():
            itemsize, extent = box.operand.dtype.itemsize, tiles.extent(box.operand)
            nbytes = box.vector * itemsize
            with w.block(self._loop(box.runs * box.vectors)):
                segment, column = self._split(box)
                begin = self._begin(box.operand, segment)
                begin = f"({begin} & -{box.vector})" if box.shifted else begin
                w.line(f"const {self.t} from = {linear([(begin, 1), (column, box.vector)])};")
                valid = f", min({nbytes}, int({extent} - from) * {itemsize})" if extent % box.vector else ""
                to, source = f"{self.places[n]} + at * {box.vector}", f"{self.outside[0][n]} + from"
                w.line(f"if ({unsigned(self.t)}(from) < {extent}) copy_async<{nbytes}>({to}, {source}{valid});")

    def _take(self, n: int, box: Box) -> None:
        """Writes the stores of a box of results."""
        w, operand, edges = self.w, box.operand, self.tiles.edges
        with w.block(self._loop(box.runs * box.vectors)):
            segment, column = self._split(box)
            w.line(f"const {self.t} along = {linear([(column, box.vector)])};")
            with w.guarded(*(edges[d].inside(linear([(self.first[d], 1), (at, 1)])) for d, at in segment.items())):
                run = [(f"{self.t}(at / {box.vectors})", box.pitch)] if box.runs > 1 else []
                source = plus(self.inner_stores[n], linear([*run, ("along", 1)]))
                to = plus(self.outside[1][n], linear([(self._begin(operand, segment), 1), ("along", 1)]))
                lead = edges[box.run[0].dim] if box.run else Edge(1, 1)
                left = str(box.length)
                if lead.ragged:
                    each = box.length // box.run[0].size
                    left = f"min({left}, int({lead.total} - {self.first[box.run[0].dim]}) * {each})"
                if box.vector == 1:
                    w.line(f"{guard(f'along < {left}' if lead.ragged else '')}*({to}) = *({source});")
                else:
                    count = f", {left} - along" if lead.ragged or box.length % box.vector else ""
                    w.line(f"store({to}, load_shared<{box.vector}>({source}){count});")

    # ---- the windows of the tile

    def _spelled(self) -> int:
        sizes = [width(window, many) for (_, window), many in zip(self.windows, self.patch)]
        return next((k for k in range(len(sizes)) if prod(sizes[k:]) <= SPELLED), len(sizes))

    def _go_inside(self) -> None:
        """Has operands that are staged read and written in shared memory from here on.

        Their pointers there are such that the tile's positions count as they do in the whole result.
        """
        tiles, rank = self.tiles, self.space.rank
        program, origins = self.program, [*self.first, *self.under]
        loads, stores = list(program.loads), list(program.stores)
        self.pointers.loads, self.pointers.stores = list(self.outside[0]), list(self.outside[1])
        for n, box in tiles.loads.items():
            steps = tuple(box.steps.get(d, 0) for d in range(rank + len(self.windows)))
            loads[n] = replace(box.operand, strides=steps)
            self.pointers.loads[n] = self._based(self.places[n], "const ", box, origins, steps)
        for n, box in tiles.stores.items():
            steps = tuple(box.steps.get(d, 0) for d in range(rank))
            stores[n] = Store(replace(box.operand, strides=(*steps, *(0 for _ in self.windows))), stores[n].value)
            self.pointers.stores[n] = self._based(self.inner_stores[n], "", box, self.first, steps)
        self.space = replace(self.space, program=replace(program, loads=tuple(loads), stores=tuple(stores)))
        self.program: Program = self.space.program

    def _based(self, name: str, const: str, box: Box, origins: list[str], steps: tuple[int, ...]) -> str:
        back = linear([(f"({o})", -t) for o, t in zip(origins, steps) if o != "0"])
        if back == "0":
            return name
        based = self.names.unique(box.operand.name, "_at")
        self.w.line(f"{const}{box.operand.dtype.ctype}* const {based} = {name} + ({back});")
        return based

    def _place(self) -> int:
        """Opens the loop over the tile's windows, and writes where a thread's are."""
        w, chunk = self.w, [1] * self.space.rank
        for (d, _), many in zip(self.windows, self.patch):
            chunk[d] = many
        if self.s.vector > 1:
            chunk[-1] = self.s.vector
        sizes = [-(-size // each) for size, each in zip(self.tiles.size, chunk)]
        w.open(self._loop(prod(sizes)))
        self.at = []
        for d, (name, size, each) in enumerate(zip(self._coordinates(), sizes, chunk)):
            terms = [(self.first[d], 1)]
            if most(size) > 1:
                terms.append((f"{self.t}({coordinate('at', sizes, d)})", each))
            text = linear(terms)
            if text != "0":
                w.line(f"const {self.t} {name} = {text};")
            self.at.append(name if text != "0" else "0")
        outside = [edge.outside(at) for edge, at in zip(self.tiles.edges, self.at)]
        w.leave(*outside)
        for n, box in self.tiles.loads.items():
            if box.shifted:
                self._shift(n, box)
        return prod(sizes)

    def _shift(self, n: int, box: Box) -> None:
        """Writes how far behind a vector the elements under a thread's windows begin."""
        outer = (a.dim for a in box.segments if a.dim < self.space.rank)
        begin = self._begin(box.operand, {d: linear([(self.at[d], 1), (self.first[d], -1)]) for d in outer})
        name, based = self.names.unique(box.operand.name, "_p"), self.pointers.loads[n]
        self.w.line(f"const {box.operand.dtype.ctype}* const {name} = {based} + (({begin}) & {box.vector - 1});")
        self.pointers.loads[n] = name

    def read(self, n: int, target: str, inside: str) -> None:
        if n not in self.tiles.loads:
            super().read(n, target, inside)
            return
        offset = self.offset(self.program.loads[n].strides, [*self.at, *self.sources()])
        read(self.w, target, self.pointers.loads[n], offset, self.count(n), load="load_shared")

    @property
    def _run(self) -> tuple[str, int]:
        return "e", self.s.vector
