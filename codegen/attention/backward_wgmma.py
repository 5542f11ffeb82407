"""Attention's gradients on Hopper: all products by warpgroups (wgmma), of tiles that TMA brings.

A block keeps a tile of queries, or of keys, and one of its threads brings tiles of the other side in a ring of stages.
Each consumer, a warpgroup, has 64 rows.  Probabilities and gradients stay in registers: as the first products leave
them, they are the operands A of the sums.  Where rows are keys, the scores are therefore computed transposed.  While
the tensor cores multiply a tile, the consumer computes the exponentials of the next one or the gradients of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.attention.backward_fragments import BackwardFragments
from codegen.attention.backward_scores import INTERVALS, without_places
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma_producer import NUMBERS, Producer
from codegen.attention.backward_wgmma_schedule import AttentionBackwardWgmmaSchedule, registers, shared_bytes
from codegen.attention.scores import kernel_details
from codegen.attention.wgmma_schedule import GROUP, PANEL, ROWS, box, columns, coordinates, panels
from codegen.declined import Declined
from codegen.expr import Operand
from codegen.iteration import linear
from codegen.kernel import Kernel, parameter
from codegen.spec import KernelSource, TensorMap


@dataclass(frozen=True)
class Result:
    """A result: the C variable of its sums, their factor, its operand, and the elements of a row."""

    sums: str
    factor: float
    op: Operand
    elements: int
    tile: str
    name: str
    map: TensorMap | None


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardWgmmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return Renderer(without_places(spec), schedule).render()


class Renderer(Producer):
    """Writes a kernel of warpgroups."""

    def __init__(self, spec: AttentionBackwardSpec, schedule: AttentionBackwardWgmmaSchedule) -> None:
        self.spec, self.s, self.a = spec, schedule, spec.attention
        self.registers = registers(spec, schedule)
        a = self.a
        self.w = Kernel(spec.name)
        self.names = self.w.names
        self.maps_of = [self.names.unique(op.name, "_map") for op in spec.arguments[:4]]
        self.lse, self.row_dot = (self.names.unique(op.name) for op in spec.arguments[4:])
        top = linear([("r0", 1), ("group", ROWS if schedule.groups > 1 else 0)])
        self.scores = BackwardFragments(self.w, spec, self.names, schedule.height, schedule.cols, top, ROWS)
        sizes = ((a.rows, a.depth), (a.keys, a.depth), (a.keys, a.width), (a.rows, a.width))
        boxed = [schedule.height if (n in (0, 3)) == spec.queries else schedule.cols for n in range(4)]
        self.maps = [
            box(a, op, n, rows, elements, height)
            for n, (op, (rows, elements), height) in enumerate(zip(spec.arguments, sizes, boxed))
        ]
        names = ("queries", "keys", "values", "losses")
        order = (0, 3, 1, 2) if spec.queries else (1, 2, 0, 3)
        self.held, self.brought = [(names[n], n) for n in order[:2]], [(names[n], n) for n in order[2:]]
        self.element = a.q.dtype.ctype
        self.deep, self.wide = panels(a.depth), panels(a.width)
        self.with_loss = spec.first is not None or spec.by_scores is not None
        self.each = True
        self.results: list[Result] = []
        number = len(spec.arguments) + len(a.loads)
        for sums, factor, op, elements, tile in (
            ("by_s", spec.factor, spec.first, a.depth, self.held[0][0]),
            ("by_p", 1.0, spec.second, a.width, self.held[1][0]),
        ):
            if op is not None:
                found: TensorMap | None = None
                try:
                    if op.dtype.itemsize == 2:
                        found = box(a, op, number, spec.rows, elements, ROWS)
                except Declined:
                    pass
                name = self.names.unique(op.name, "_map" if found else "")
                self.results.append(Result(sums, factor, op, elements, tile, name, found))
                number += 1
        self.mapped = [r for r in self.results if r.map is not None]
        self.by_scores = self.names.unique(spec.by_scores.name) if spec.by_scores is not None else ""
        self.tiles, self.batches = -(-spec.rows // schedule.height), prod(spec.batch)
        self.head = f"b{len(a.batch) - 1}" if spec.summed > 1 else ""

    def render(self) -> KernelSource:
        w, s, spec, a = self.w, self.s, self.spec, self.a
        program = a.program
        details = [
            *kernel_details(a),
            f"for {s.height} {spec.over} a block, tiles of {s.cols} of the others in {s.stages} stages filled by TMA, "
            f"{s.groups} consumer warpgroup{'s' if s.groups > 1 else ''}",
        ]
        w.macros |= dict.fromkeys(f"FUSEGRAPH_WGMMA({n})" for n in self._shapes())
        constant = "const __grid_constant__ TensorMap "
        parameters = [constant + name for name in self.maps_of]
        parameters += [parameter(op, name) for op, name in zip(spec.arguments[4:], (self.lse, self.row_dot))]
        parameters += self.scores.parameters()
        parameters += [constant + r.name if r.map else parameter(r.op, r.name, written=True) for r in self.results]
        if spec.by_scores is not None:
            parameters.append(parameter(spec.by_scores, self.by_scores, written=True))
        parameters += self._more_parameters()
        w.parameters += parameters
        self._shared()
        w.open("if (group < 0)")
        self._producer()
        w.otherwise()
        self._consumer()
        w.close()
        count = len(spec.arguments) + len(a.loads)
        passed: list[int | TensorMap] = [*self.maps, *range(4, count)]
        passed += [r.map or count + n for n, r in enumerate(self.results)]
        if spec.by_scores is not None:
            passed.append(count + len(self.results))
        return w.source(
            program,
            details,
            blocks=min(self.tiles * self.batches, s.blocks),
            threads=s.threads,
            barriers=True,
            blocks_per_sm=1,
            shared_bytes=shared_bytes(spec, s),
            arguments=passed,
        )

    # ---- for a kernel that does more (`codegen.attention.backward_fused`)

    def _shapes(self) -> list[int]:
        """Returns the numbers of columns of the products."""
        return [self.s.cols, *(columns(r.elements) for r in self.results)]

    def _more_parameters(self) -> list[str]:
        return []

    # ---- the consumers

    def _consumer(self) -> None:
        w, s, spec = self.w, self.s, self.spec
        half = s.cols // 2
        w.line(f"registers_increase<{self.registers[1]}>();")
        w.line(f"const int t = threadIdx.x % {GROUP}, lane = t % 32;")
        w.line(
            f"const int row = {linear([('group', ROWS if s.groups > 1 else 0), ('t / 32 * 16', 1), ('lane / 4', 1)])};"
            "  // of a thread's first result in the tile"
        )
        self.scores.unit()
        self.scores.scalars()
        w.line(f"Ring<{s.stages}> stage;")
        if not spec.queries:
            w.line("int place = 0;  // of the queries' numbers")
        w.line(f"Ring<{s.ahead}> held;")
        if self.mapped and s.ahead > 1:
            w.line("bool stored = false;  // whether results are on their way out of the tile before")
        self._work()
        for r in self.results:
            w.line(f"float {r.sums}[{columns(r.elements) // 2}] = {{}};")
        w.line(f"float s[{half}]{f', d[{half}]' if self.with_loss else ''}{f', slope[{half}]' if spec.sloped else ''};")
        both = spec.first is not None and spec.second is not None
        factors = ("factor", "g_factor" if s.apart and both else "factor")
        w.line(f"uint32 {', '.join(f'{name}[{s.cols // 16}][4]' for name in dict.fromkeys(factors))};")
        self.scores.random_state()
        if spec.queries:
            self.scores.row_numbers(self.lse, self.row_dot)
        w.line("barrier_wait(shared.held_full[held.index], held.parity);")
        if self.scores.ranged:
            every = (f"{name} = shared.met[held.index][{n}]" for n, name in enumerate(INTERVALS))
            w.line(f"const int {', '.join(every)};")
        self._tiles()
        self.scores.define()
        w.line(f"Ring<{s.stages}> previous = stage;")
        with w.block("for (int tile = first; tile < last; ++tile)"):
            w.line("barrier_wait(shared.full[stage.index], stage.parity);")
            self._multiply("s", 0)
            w.line("wgmma_wait<1>();  // the sums of the tile before are made")
            w.line("if (t == 0 && tile > first) barrier_arrive(shared.empty[previous.index]);")
            if s.ahead > 1:
                self._release("t == 0 && stored && tile > first")
            if self.with_loss:
                self._multiply("d", 1)
            self.scores.draw("tile")
            w.line(f"wgmma_wait<{int(self.with_loss)}>();  // the products of queries and keys are there")
            w.line("wgmma_hold(s);")
            if not spec.queries:
                w.line(f"named_barrier_sync({NUMBERS} + group, {GROUP + 32});  // so are the queries' numbers")
            self.scores.probabilities("tile", "&shared.numbers[group][place][0][0]")
            if spec.second is not None:
                self._sum("by_p", "factor", 1)
            if self.with_loss:
                w.line(f"wgmma_wait<{int(spec.second is not None)}>();  // those with the loss are there")
                w.line("wgmma_hold(d);")
                ready = "wgmma_wait<0>();  // the operands are no longer needed" if both and not s.apart else ""
                self.scores.gradients("tile", "&shared.numbers[group][place][1][0]", self.by_scores, factors[1], ready)
            if spec.first is not None:
                self._sum("by_s", factors[1], 0)
            w.line("previous = stage;")
            w.line("++stage;" if spec.queries else "++stage, place ^= 1;")
            self._end_work()
            w.line("wgmma_wait<0>();")
            w.line("if (t == 0 && first < last) barrier_arrive(shared.empty[previous.index]);")
            self._end_tiles()
            if s.ahead > 1:
                self._release("t == 0 && stored")
            for r in self.results:
                w.line(f"wgmma_hold({r.sums});")
            self._store()
        if self.mapped and s.ahead > 1:
            w.line("if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it")

    def _release(self, condition: str) -> None:
        """Lets the producer overwrite the tile of rows before, once its results have been read from shared memory."""
        w = self.w
        if self.mapped:
            with w.block(f"if ({condition})"):
                w.line("tma_wait_read<0>();")
                w.line("barrier_arrive(shared.held_empty[held.index ^ 1]);")
                w.line("stored = false;")

    def _multiply(self, result: str, which: int) -> None:
        """Writes the products of the rows with a tile of the ring."""
        w, s = self.w, self.s
        (held, _), (other, _) = self.held[which], self.brought[which]
        steps = -(-(self.a.width if which else self.a.depth) // 16)
        part = f"group * {ROWS}" if s.groups > 1 else "0"
        w.line("wgmma_fence();")
        with w.unrolled(f"for (int kk = 0; kk < {steps}; ++kk)"):
            rows = f"&shared.{held}[held.index][kk / 4][{part}][kk % 4 * 16]"
            cols = f"&shared.{other}[stage.index][kk / 4][0][kk % 4 * 16]"
            w.line(f"wgmma<{self.element}, {self.element}, {s.cols}>(")
            w.line(f"    {result}, matrix_descriptor<128>({rows}, 16, 1024),")
            w.line(f"    matrix_descriptor<128>({cols}, 16, 1024), kk > 0);")
        w.line("wgmma_commit();")

    def _sum(self, sums: str, factor: str, which: int) -> None:
        """Writes the products of a tile of operands A, which are in registers, with a tile of the ring."""
        w, s = self.w, self.s
        width = columns(self.a.width if which else self.a.depth)
        w.line("wgmma_fence();")
        with w.unrolled(f"for (int kk = 0; kk < {s.cols // 16}; ++kk)"):
            w.line(f"wgmma<{self.element}, {self.element}, {width}, 1>(")
            place = f"&shared.{self.brought[which][0]}[stage.index][0][kk * 16][0]"
            w.line(f"    {sums}, {factor}[kk], matrix_descriptor<128>({place}, {s.cols * 128}, 1024), true);")
        w.line("wgmma_commit();")

    # ---- results

    def _store(self) -> None:
        w, s = self.w, self.s
        part = f"group * {ROWS}" if s.groups > 1 else "0"
        mapped = self.mapped
        for r in self.results:
            if r.map is None:
                self.scores.store(r.sums, r.op, r.name, r.elements, columns(r.elements), r.factor)
        if not mapped:
            # Warps that multiply are in step; where there was nothing to multiply one may be late.
            w.line(f"named_barrier_sync(1 + group, {GROUP});  // all warps have been here")
            w.line("if (t == 0) barrier_arrive(shared.held_empty[held.index]);")
            return
        w.line("// The results take the place of what the block kept, of which nothing is left to multiply.")
        for r in mapped:
            out = r.op.dtype.ctype
            with w.unrolled(f"for (int j = 0; j < {columns(r.elements)}; j += 16)"):
                w.line(f"Vector<{out}, 2> v[4];")
                w.line("#pragma unroll")
                value = f"{r.sums}[j / 2 + i]"
                if r.factor != 1:
                    value = f"{self.scores.literal(r.factor)} * {value}"
                w.line(f"for (int i = 0; i < 8; ++i) v[i / 2][i % 2] = convert<{out}>({value});")
                pointer = f"&shared.{r.tile}[held.index][j / {PANEL}][{part}][0]"
                if out != self.element:
                    pointer = f"reinterpret_cast<{out}*>({pointer})"
                w.line(f"store_fragments<{PANEL}>({pointer}, t / 32 * 16, j % {PANEL}, v);")
        w.line("fence_async_shared();")
        w.line(f"named_barrier_sync(1 + group, {GROUP});")
        with w.block("if (t == 0)"):
            first = linear([("r0", 1), ("group", ROWS if s.groups > 1 else 0)])
            for r in mapped:
                with w.unrolled(f"for (int i = 0; i < {panels(r.elements)}; ++i)"):
                    at = f"i * {PANEL}, {coordinates(self.a, r.op, first)}"
                    w.line(f"tma_store({r.name}, shared.{r.tile}[held.index][i][{part}], {at});")
            w.line("tma_commit();")
            if s.ahead > 1:
                w.line("stored = true;")
            else:
                w.line("tma_wait_read<0>();")
                w.line("barrier_arrive(shared.held_empty[held.index]);")
