"""Pool kernels whose threads each fold their windows alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod

from codegen.buffers import Edge
from codegen.expr import Emitter, Index, Load, Operand, Reduced, Reduction, Result, Value, ctype_of, literal
from codegen.iteration import aligned, coordinate, linear, unsigned
from codegen.kernel import Kernel, constant, converted, thread_number
from codegen.naming import identifier
from codegen.pointwise.body import read, registers, vector_type, write
from codegen.pool.elements import POSITIONS, Elements
from codegen.pool.schedule import PoolSchedule, held_from
from codegen.pool.space import steps, width
from codegen.pool.steps import THREADS
from codegen.sizes import most
from codegen.spec import KernelSource, PoolSpec
from codegen.windows import Adaptive

#: Most elements under a window that are spelled out though they are not held in registers.
SPELLED = 16


class PoolRenderer(Elements):
    """Writes a kernel, or a part of one that shares the names, pointers and writer of the whole."""

    #: the C function that stores a vector of results
    store = "store"
    #: whether elements are read before any is used, where they fit
    holds = True
    #: the C type of 16-bit floats two of which are folded at once, "" if one is, in the reductions' compute types
    pairs = ""

    def __init__(self, spec: PoolSpec, schedule: PoolSchedule, kernel: Kernel | None = None) -> None:
        super().__init__(spec, schedule, kernel)
        self.emitter = Emitter(self.program, self.names)
        #: loads that all elements under the thread's windows share: their C names
        self.fixed: dict[int, str] = {}
        #: C names of the folds of the windows, by reduction; and of the largest elements, for those that give places
        self.parts: dict[int, str] = {}
        self.largest: dict[int, str] = {}

    # ---- structure

    def render(self) -> KernelSource:
        threads = self.body()
        return self.source(self._details(), -(-threads // THREADS))

    def source(self, details: str, blocks: int, *, barriers: bool = False) -> KernelSource:
        """Returns the kernel, whose body is complete."""
        self.w.parameters += self.pointers.parameters()
        return self.w.source(self.program, [details], blocks=blocks, threads=THREADS, barriers=barriers)

    def body(self) -> int:
        """Writes the statements of the threads; returns how many threads there are."""
        threads = self._place()
        self._fixed_loads()
        self._declare_parts()
        first = held_from(self.space, self.s) if self.holds else self._spelled()
        with self.scope():
            conditions = self.open_taps(0, first, rolled=True)
            held = self.hold(first, conditions) if self.holds and first < len(self.windows) else {}
            self._fold(first, conditions, held)
        self._results()
        return threads

    def _spelled(self) -> int:
        """Returns the first window whose loop is spelled out, and those behind it, where elements are not held."""
        last = len(self.windows) - 1
        return last if self.windows[last][1].count <= SPELLED else last + 1

    def _details(self) -> str:
        sizes = " x ".join(str(window.count) for _, window in self.windows) or "1"
        shape = " x ".join(str(m) for m in self.patch if m > 1)
        many = f"{shape} windows" if shape else "a window"
        across = f" of {self.s.vector} neighbours" if self.s.vector > 1 else ""
        return f"windows of {sizes}; a thread takes {many}{across}"

    def _place(self) -> int:
        """Writes where the thread's windows are; returns the number of threads."""
        w, s, outer = self.w, self.s, self.space.outer
        chunk = [1] * self.space.rank
        for (d, _), many in zip(self.windows, self.patch):
            chunk[d] = many
        if s.vector > 1:
            chunk[-1] = s.vector
        names = self._coordinates()
        tall = self.windows[-2][0] if s.down > 1 else None
        # The digits of a thread's number: those of the outer dimensions, and ``down`` behind the last one with windows.
        digits: list[tuple[int, int, int]] = []  # (dimension, size, factor)
        for d, size in enumerate(outer):
            each = chunk[d] * (s.down if d == tall else 1)
            digits.append((d, -(-size // each), each))
            if tall is not None and d == self.windows[-1][0]:
                digits.append((tall, s.down, chunk[tall]))
        sizes = [size for _, size, _ in digits]
        total = prod(sizes)
        self._number(total)
        terms: list[list[tuple[str, int]]] = [[] for _ in outer]
        for k, (d, size, factor) in enumerate(digits):
            if most(size) > 1:
                terms[d].append((f"({coordinate('at', sizes, k)})", factor))
        self.at = []
        for d, parts in enumerate(terms):
            if parts:
                text = linear(parts)
                text = text[1:-1] if len(parts) == 1 and parts[0][1] == 1 else text
                w.line(f"const {self.t} {names[d]} = {text};")
            self.at.append(names[d] if parts else "0")
        if tall is not None and outer[tall] % (s.down * chunk[tall]):
            w.line(f"if ({self.at[tall]} >= {outer[tall]}) return;")
        return total

    def _coordinates(self) -> list[str]:
        """Returns the names of the result's coordinates."""
        n = len(self.windows)
        names = [f"outer{d}" for d in range(self.space.rank)]
        free = [d for d in range(self.space.rank) if all(d != k for k, _ in self.windows)]
        if free[:1] == [0]:
            names[0] = "outer"
        if self.space.inner and self.space.rank > 1:
            names[-1] = "inner"
        for k, (d, _) in enumerate(self.windows):
            names[d] = POSITIONS[n - 1 - k] if n - 1 - k < len(POSITIONS) else f"window{d}"
        return names

    def _number(self, total: int) -> None:
        """Writes the thread's number, ``at``, out of ``total``."""
        thread_number(self.w, unsigned(self.t), "at", Edge(total, THREADS))

    def _fixed_loads(self) -> None:
        """Writes the loads of operands that all elements under the thread's windows share."""
        moving = [d for (d, _), many in zip(self.windows, self.patch) if many > 1]
        for n, operand in enumerate(self.program.loads):
            used = Load(n) in self.space.folded or Load(n) in self.space.final
            if used and n not in self.space.taps and not any(operand.strides[d] for d in moving):
                self.fixed[n] = self._load(n, self.offset(operand.strides, self.at), self.s.vector)

    def _declare_parts(self) -> None:
        program = self.program
        start: list[tuple[str, str, str]] = []
        for k, reduction in enumerate(program.reductions):
            self.parts[k] = self._free(reduction)
            start.append((self._ctype(reduction), self.parts[k], self._start(reduction.start)))
        for k, reduction in enumerate(program.reductions):
            if reduction.at is None:
                continue
            # Another reduction may compute the maximum itself.
            of = reduction.combiner, reduction.value
            same = [j for j, r in enumerate(program.reductions) if (r.combiner, r.value, r.at) == (*of, None)]
            if same:
                self.largest[k] = self.parts[same[0]]
            else:
                ctype = ctype_of(program, reduction.value)
                self.largest[k] = self.names.unique(f"{reduction.name} largest")
                start.append((ctype, self.largest[k], replace(reduction, ctype=ctype, at=None).start))
        self._declare(start, "pqe")

    def _declare(self, start: list[tuple[str, str, str]], variables: str) -> None:
        """Declares (C type, name, first value), one for each of what some variables number."""
        w, each = self.w, [(name, size) for name, size in self._each if name in variables and size > 1]
        box = "".join(f"[{size}]" for _, size in each)
        filled = []
        for ctype, name, value in start:
            zero = (value[-1].isdigit() or value.endswith("0f")) and value.removesuffix("f") in ("0", "0.0")
            w.line(f"{ctype} {name}{box}{'' if box and not zero else ' = {}' if box else f' = {value}'};")
            if box and not zero:
                filled.append((name, value))
        with ExitStack() as loops:
            for variable, size in each if filled else ():
                loops.enter_context(w.repeated(variable, size))
            for name, value in filled:
                w.line(f"{self._part(name, variables)} = {value};")

    def _free(self, reduction: Reduction) -> str:
        """Returns a name for the fold of a window, different from those of tensors."""
        taken = identifier(reduction.name) in {identifier(operand.name) for operand in self.program.operands}
        return self.names.unique(
            reduction.name, ("_at" if reduction.at is not None else f"_{reduction.combiner.word}") if taken else ""
        )

    @property
    def _each(self) -> list[tuple[str, int]]:
        """Variables and numbers of a thread's windows: rows and columns of the patch, neighbours in memory."""
        rows, cols = [1, 1, *self.patch][-2:]
        return [("p", rows), ("q", cols), ("e", self.s.vector // 2 if self.pairs else self.s.vector)]

    def _ctype(self, reduction: Reduction) -> str:
        return "uint32" if self.pairs else reduction.ctype

    def _start(self, start: str) -> str:
        """Returns the C literal of a fold before its first element, or of a pair of them."""
        if not self.pairs:
            return start
        infinity = {"bfloat16": 0x7F80, "float16": 0x7C00}[self.pairs] | (0x8000 if start.startswith("-") else 0)
        return f"0x{infinity * 0x10001:08x}u"

    def _combined(self, reduction: Reduction, total: str, value: str) -> str:
        """Returns the C statement that combines an element, or a pair, with a fold."""
        if not self.pairs:
            return reduction.into(total, value)
        function = reduction.combiner.function.replace("math::", f"PairOf<{self.pairs}>::")
        return f"{total} = {function}({total}, {value});"

    def _part(self, name: str, variables: str = "pqe") -> str:
        """Returns the C expression of the element for window (p, q) and neighbour e, or of one for some of these."""
        return name + "".join(f"[{variable}]" for variable, many in self._each if many > 1 and variable in variables)

    def _fold(self, first: int, conditions: list[str], held: dict[int, str]) -> None:
        """Writes the folding of the elements under the windows, and the reads of those that are not held."""
        w, last = self.w, len(self.windows) - 1
        if not self._in_lines(first):
            with w.guarded(self.inside(conditions + self.open_taps(first, last + 1))):
                self._element_of_windows(held, self.parts, "pq")
            return
        with w.guarded(self.inside(conditions + self.open_taps(first, last), "row_inside")):
            lines = {k: self.names.unique(self.program.reductions[k].name, "_line") for k in self.parts}
            every = enumerate(self.program.reductions)
            self._declare([(self._ctype(r), lines[k], self._start(_neutral(r))) for k, r in every], "qe")
            with self.scope(), w.guarded(self.inside(self.open_taps(last, last + 1))):
                self._element_of_windows(held, lines, "q")
            with self._over_patch("p"), ExitStack() as loops:
                for variable, size in self._each[1:]:
                    loops.enter_context(w.repeated(variable, size))
                for k, r in enumerate(self.program.reductions):
                    w.line(self._combined(r, self._part(self.parts[k]), self._part(lines[k], "qe")))

    def _in_lines(self, first: int) -> bool:
        """Tells whether elements are folded along the last windows first: several of a thread's windows share these."""
        several = first < len(self.windows) - 1 and self.patch[-2] > 1
        alike = all(r.at is None for r in self.program.reductions) and not self._of_one_window()
        directly, in_lines = steps(self.space, self.patch)
        return several and alike and in_lines < directly

    def _element_of_windows(self, held: dict[int, str], parts: dict[int, str], variables: str) -> None:
        """Writes how the current element is combined with ``parts`` of the windows that some variables number."""
        w, program, space = self.w, self.program, self.space
        terms: dict[Value, str] = {}
        under = dict(held)
        for n in space.taps:
            if n not in under:
                under[n] = self.names.unique(program.loads[n].name, "_v")
                kind = vector_type(program.loads[n], self.count(n))
                self.read(n, f"const {kind.replace('Vector', 'Packed') if self.pairs else kind} {under[n]}", "")
        with w.repeated(*self._each[-1]):
            for n in range(len(program.loads)):
                if Load(n) in space.folded and self.pairs:
                    terms[Load(n)] = f"{under[n]}.words[{'e' if self.s.vector > 2 else '0'}]"
                elif Load(n) in space.folded:
                    name = under[n] if n in under else self.fixed[n]
                    terms[Load(n)] = self._element(n, f"{name}[e]" if self.count(n) > 1 else name)
            where = [*self._where("pq"), *self.sources()]
            for k, strides in enumerate(program.indices):
                if Index(k) in space.folded:
                    terms[Index(k)] = f"int32({self.offset(strides, where, element=True)})"
            own = self._of_one_window()
            self.emitter.statements(w, terms, lambda k: Result(k) in space.folded and Result(k) not in own)
            with self._over_patch(variables):
                self.emitter.statements(w, terms, lambda k: Result(k) in own)
                for k in range(len(program.reductions)):
                    self._into(k, terms, self._part(parts[k], variables + "e"))

    @property
    def _patched(self) -> list[tuple[str, int]]:
        """The variables that number a thread's windows, and the windows along which it has several."""
        n = len(self.windows)
        return [(name, k) for name, k in (("p", n - 2), ("q", n - 1)) if k >= 0 and self.patch[k] > 1]

    def _where(self, variables: str) -> list[str]:
        """Returns the position of that of the thread's windows which some of the variables p and q number."""
        where = list(self.at)
        for name, k in self._patched:
            if name in variables:
                d = self.windows[k][0]
                where[d] = linear([(where[d], 1), (name, 1)])
        return where

    def _into(self, k: int, terms: dict[Value, str], part: str) -> None:
        """Writes how an element is combined with ``part``, the fold of its window or of a line of it."""
        w, reduction = self.w, self.program.reductions[k]
        value = self.emitter.term(reduction.value, terms)
        if reduction.at is not None:
            largest = self._part(self.largest[k])
            nan = f" || {value} != {value}" if ctype_of(self.program, reduction.value) in ("float", "double") else ""
            with w.block(f"if ({part} < 0 || {value} > {largest}{nan})"):
                w.line(f"{largest} = {value};")
                w.line(f"{part} = {self.emitter.term(reduction.at, terms)};")
        elif self.parts[k] not in self.largest.values():
            w.line(self._combined(reduction, part, value))

    def _of_one_window(self) -> set[Value]:
        """Returns the values of every element of a window that differ between the thread's windows."""
        moving = [d for (d, _), many in zip(self.windows, self.patch) if many > 1]
        indices = enumerate(self.program.indices)
        found: set[Value] = {Index(k) for k, strides in indices if any(strides[d] for d in moving)}
        for k, instruction in enumerate(self.program.instructions):
            if Result(k) in self.space.folded and not found.isdisjoint(instruction.args):
                found.add(Result(k))
        return found

    @contextmanager
    def _over_patch(self, variables: str = "pq") -> Iterator[None]:
        """Writes loops over those of the thread's windows that contain the current element, by some variables."""
        with ExitStack() as loops:
            for variable, k in self._patched:
                if variable not in variables:
                    continue
                window = self.windows[k][1]
                assert not isinstance(window, Adaptive)
                place = self.tap(k) if width(window, self.patch[k]) > 1 else "0"
                loops.enter_context(self.w.repeated(variable, self.patch[k]))
                q_step, i_step, start = window.offset()
                offset = linear(sorted([(place, i_step), (variable, q_step)], key=lambda term: -term[1]), start)
                found = [f"{offset} < 0", f"{offset} >= {window.reach}"]
                if window.dilation > 1:
                    found.append(f"({offset}) % {window.dilation} != 0")
                self.w.line(f"if ({' || '.join(found)}) continue;  // not in window {variable}")
            yield

    # ---- the results

    @property
    def _run(self) -> tuple[str, int]:
        """Variable and number of results that are neighbours in memory: a vector's, or those of a row of windows."""
        d = self.windows[-1][0] if self.windows else -1
        if self.s.vector == 1 and d == self.space.rank - 1 and self.space.outer[d] % self.patch[-1] == 0:
            return "q", self.patch[-1]
        return "e", self.s.vector

    def _wide(self, operand: Operand) -> bool:
        """Tells whether a run of results can be one access."""
        count = self._run[1]
        return operand.strides[self.space.rank - 1] == 1 and aligned(operand, count, self.space.rank - 1)

    def _load(self, n: int, offset: str, count: int) -> str:
        """Writes a load of ``count`` neighbours at a position of the result; returns its C name."""
        operand, step = self.program.loads[n], self.program.loads[n].strides[self.space.rank - 1]
        count = 1 if step == 0 else count
        name = self.names.unique(operand.name, "_v" if count > 1 else "_s")
        target, pointer = f"const {vector_type(operand, count)} {name}", self.pointers.loads[n]
        read(self.w, target, pointer, offset, count, step, load="load" if self._wide(operand) else "")
        return name

    def _element(self, n: int, text: str) -> str:
        """Writes a load's element in its compute type as a constant, if it must be converted; returns it in C."""
        operand = self.program.loads[n]
        value = converted(operand, text, self.program.real)
        if value == text and text.count("[") < 2:
            return text
        return constant(self.w, self.names, self.program, n, text, "_e")

    def _results(self) -> None:
        """Writes the program on the folds of the windows, and its stores."""
        w, space, variable = self.w, self.space, self._run[0]
        where = self._where("pq".replace(variable, ""))
        with ExitStack() as loops:
            for name, k in self._patched:
                if name != variable:
                    rows, d = Edge(space.outer[self.windows[k][0]], self.patch[k]), self.windows[k][0]
                    loops.enter_context(w.repeated(name, rows.size))
                    if rows.ragged:
                        w.line(f"if ({where[d]} >= {rows.total}) break;")
            self._run_of_results(where)

    def _run_of_results(self, where: list[str]) -> None:
        """Writes the program on the folds of windows that are neighbours in memory, and its stores."""
        w, program, space = self.w, self.program, self.space
        variable, count = self._run
        loads = {
            n: self._load(n, self.offset(operand.strides, where), count)
            for n, operand in enumerate(program.loads)
            if Load(n) in space.final and n not in self.fixed
        } | self.fixed
        offsets = [self.offset(store.operand.strides, where) for store in program.stores]
        stores = [*zip((store.operand for store in program.stores), self.pointers.stores, offsets)]
        vectors = [registers(w, operand, count) if count > 1 else "" for operand, _, _ in stores]
        with w.repeated(variable, count):
            terms = self._final_terms(loads, where)
            self.emitter.statements(w, terms, lambda k: Result(k) in space.final)
            for store, (_, pointer, offset), name in zip(program.stores, stores, vectors):
                target = f"{name}[{variable}]" if name else f"{pointer}[{offset}]"
                w.line(f"{target} = {self.emitter.stored(store, terms)};")
        for (operand, pointer, offset), name in zip(stores, vectors):
            if name:
                how = self.store if self._wide(operand) else ""
                write(w, pointer, offset, name, count, operand.strides[space.rank - 1], how)

    def _folded(self, k: int) -> str:
        """Returns the C expression of the fold of window (p, q) and neighbour e."""
        if not self.pairs:
            return self._part(self.parts[k])
        pair = self._part(self.parts[k], "pq") + ("[e / 2]" if self.s.vector > 2 else "")
        return f"convert<{self.program.reductions[k].ctype}>(element_of<{self.pairs}>({pair}, e % 2))"

    def _final_terms(self, loads: dict[int, str], where: list[str]) -> dict[Value, str]:
        """Returns the C expressions of what the program on the folds needs, for one of a run of results."""
        program, last = self.program, self.space.rank - 1
        variable, count = self._run
        terms: dict[Value, str] = {Reduced(k): self._folded(k) for k in range(len(program.reductions))}
        for n, name in loads.items():
            if Load(n) in self.space.final:
                one = program.loads[n].strides[last] == 0 or count == 1
                terms[Load(n)] = self._element(n, name if one else f"{name}[{variable}]")
        for k, strides in enumerate(program.indices):
            step = [(variable, strides[last])] if count > 1 else []
            terms[Index(k)] = f"int32({linear([*zip(where, strides), *step])})"
        return terms


def _neutral(reduction: Reduction) -> str:
    """Returns the C literal of a line's fold before its first element: adding to -0.0 changes nothing, even a zero."""
    return literal(-0.0, reduction.ctype) if reduction.operator == "+" else reduction.start
