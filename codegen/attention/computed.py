"""Queries, keys or values that are computed while they are brought to shared memory: threads read what they are made
of, a vector of neighbouring elements at a time, and store the result where a copy would have put it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from codegen.expr import Operand
from codegen.iteration import coordinate, linear
from codegen.naming import Names, Writer
from codegen.pointwise.body import Elements, plus, vector_type
from codegen.pointwise.schedule import aligned
from codegen.pointwise.tables import ahead
from codegen.spec import ComputedRows

#: The most bytes of a vector of results, and vectors that a thread has on their way.
MOST_BYTES, IN_FLIGHT = 16, 4


class Computed(Elements):
    """Writes the tiles of one operand.

    reads   the number of tensors that it is made of: the first of its parameters.
    vector  elements that a thread makes at a time.
    """

    def __init__(self, w: Writer, rows: ComputedRows, names: Names) -> None:
        super().__init__(w, rows.program, names)
        self.reads = len(rows.program.loads) + len(rows.program.tables)
        self.dtype = rows.program.stores[0].operand.dtype
        self._sizes, self._depth = rows.elements, prod(rows.elements)
        last = self._sizes[-1]
        fits = [n for n in (16, 8, 4, 2, 1) if n * self.dtype.itemsize <= MOST_BYTES and self._depth % n == 0]
        # A vector is a part of the last dimension, or several times all of it.
        self.vector = next(n for n in fits if last % n == 0 or (n % last == 0 and self._sizes[-2] % (n // last) == 0))

    def fill(
        self,
        first: str,
        size: int,
        last: int | None,
        padded: int,
        thread: str,
        threads: int,
        batch: Sequence[str],
        itype: str,
        element: str,
        store: Callable[[str], None],
    ) -> None:
        """Writes what makes ``size`` rows from ``first`` on, of ``padded`` elements, 0 behind their own.  With ``last``
        there may be no more rows than that one, which stands for those behind it.  ``store`` writes the store of a
        vector, by its name, at (r, d); its elements are of the C type ``element``.  A thread of so many has the number
        ``thread``.
        """
        w, count = self.w, self.vector
        pieces = -(-padded // count)
        name = self.names.unique(self.program.stores[0].operand.name, "_v")
        w.line(f"#pragma unroll {IN_FLIGHT}")
        w.open(f"for (int i = {thread}; i < {size * pieces}; i += {threads})")
        w.line(f"const int r = i / {pieces}, d = i % {pieces}{f' * {count}' if count > 1 else ''};")
        row = f"{first} + r" if first != "0" else "r"
        w.line(f"const {itype} m = {row if last is None else f'min({itype}({row}), {itype}({last}))'};")
        partial = pieces * count != self._depth
        w.line(f"Vector<{element}, {count}> {name}{' = {}' if partial else ''};")
        if partial:
            w.open(f"if (d < {self._depth})")
        self._vector(name, [*batch, "m"], element)
        if partial:
            w.close()
        store(name)
        w.close()

    def _vector(self, name: str, outer: Sequence[str], element: str) -> None:
        """Writes the elements from d on of a row of the coordinates ``outer``."""
        w, count, sizes = self.w, self.vector, self._sizes
        inner = []
        for k in range(len(sizes)):
            text = coordinate("d", sizes, k)
            if len(sizes) > 1:
                w.line(f"const int d{k} = {text};")
                text = f"d{k}"
            inner.append(text)

        def at(strides: Sequence[int]) -> str:
            return linear(list(zip((*outer, *inner), strides)))

        def each(strides: Sequence[int]) -> str:
            return "" if count == 1 else self._along(strides)

        loaded: dict[int, str] = {}
        same: dict[int, str] = {}
        for n in self.varying_loads():
            op, pointer, register = self.program.loads[n], self.pointers.loads[n], self.register(n)
            place, step = at(op.strides), each(op.strides)
            if step and self._wide(op):
                w.line(f"const {vector_type(op, count)} {register} = load<{count}>({plus(pointer, place)});")
                loaded[n] = f"{register}[e]"
            elif step:
                loaded[n] = f"{pointer}[{' + '.join(t for t in (place, step) if t != '0')}]"
            else:
                w.line(f"const {op.dtype.ctype} {register} = {pointer}[{place}];")
                loaded[n] = same[n] = register
        positions = [at(strides) for strides in self.program.indices]
        done = ahead(self.program, sizes, count)
        if done.reads:
            self.ahead(done, count, same, positions)
        if count > 1:
            w.line("#pragma unroll")
            w.open(f"for (int e = 0; e < {count}; ++e)")
        steps = [each(strides) for strides in self.program.indices]
        indices = [" + ".join(t for t in pair if t not in ("", "0")) or "0" for pair in zip(positions, steps)]
        (text,) = self.element(loaded, indices)
        text = text if self.dtype.ctype == element else f"convert<{element}>({text})"
        w.line(f"{name}[{'e' if count > 1 else '0'}] = {text};")
        if count > 1:
            w.close()

    def _along(self, strides: Sequence[int]) -> str:
        """How far the e-th element of a vector lies behind the first, empty if it is the same."""
        last = self._sizes[-1]
        if self.vector <= last or strides[-2] == strides[-1] * last:
            text = linear([("e", strides[-1])])
        else:
            text = linear([(f"(e / {last})", strides[-2]), (f"e % {last}", strides[-1])])
        return "" if text == "0" else text

    def _wide(self, op: Operand) -> bool:
        """Whether a vector's elements are one access."""
        outer = op.strides[:-1] if self.vector <= self._sizes[-1] else op.strides[:-2]
        width = min(16, self.vector * op.dtype.itemsize)
        return self._along(op.strides) == "e" and aligned(op, width, outer)
