"""The elements under the windows of a thread of a pool kernel: the loops along them, where they are, their loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from codegen.buffers import Edge
from codegen.iteration import coordinate, linear, unsigned
from codegen.kernel import Kernel, Pointers
from codegen.pointwise.body import plus, read, vector_type
from codegen.pool.schedule import UNROLL, UNROLLED, PoolSchedule, is_strip, patch, shares
from codegen.pool.space import normalize, width
from codegen.sizes import least, most
from codegen.spec import PoolSpec
from codegen.windows import Adaptive, Sliding, Window

#: Names of the coordinates along the last window, the last but one, and the one before.
POSITIONS = ("col", "row", "plane")
_TAPS = ("kx", "ky", "kz")
_PLACES = ("ix", "iy")


class Elements:
    """What a kernel reads, and in which order; what becomes of it is left to `PoolRenderer`."""

    def __init__(self, spec: PoolSpec, schedule: PoolSchedule, kernel: Kernel | None = None) -> None:
        self.spec, self.s = spec, schedule
        #: windows behind the last that are folded elsewhere
        self.beyond = 0
        self.space = normalize(spec)
        self.program = self.space.program
        self.windows = self.space.windows
        self.patch = patch(self.space, schedule)
        #: threads of a window beside each other along each of its dimensions
        self.shares = shares(self.space, schedule.lanes)
        self.t = schedule.itype
        #: C type of counters, which strides multiply
        self.small = "int" if self.t == "int32" else self.t
        self.w = kernel or Kernel(spec.name)
        self.names = self.w.names
        self.pointers = Pointers(self.program, self.names)
        #: constants of elements that are in scope, and how deep
        self._scope: dict[str, int] = {}
        #: C expressions of the position of the thread's first window along each outer dimension
        self.at: list[str] = []

    def open_taps(self, first: int, last: int, *, rolled: bool = False) -> list[str]:
        """Opens the loops along some windows, writes which elements they are at; returns when these exist, in C."""
        conditions: list[str] = []
        counts = [width(window, many) for (_, window), many in zip(self.windows, self.patch)]
        for k in range(first, last):
            d, window = self.windows[k]
            innermost = k == last - 1 and last == len(self.windows)
            unroll = "" if not rolled or prod(counts[k:]) <= UNROLLED else f" {UNROLL if innermost else 1}"
            conditions += self._open(k, self.at[d], window, f"#pragma unroll{unroll}", rolled=rolled)
        return conditions

    def _open(self, k: int, position: str, window: Window, unroll: str, *, rolled: bool) -> list[str]:
        w, t = self.w, self.t
        back = len(self.windows) - 1 - k
        place = self._source(k)
        if isinstance(window, Adaptive):
            start = quotient(linear([(position, window.size)]), window.positions)
            end = quotient(linear([(position, window.size)], window.size + window.positions - 1), window.positions)
            if rolled:
                w.line("#pragma unroll 4" if back == 0 else "#pragma unroll 1")
                w.open(f"for ({t} {place} = {start}{self._lane(k)}; {place} < {end}; {self._next(k, place)})")
                return []
            self.constant(t, f"{place}_begin", start)
            if not window.alike:
                self.constant(t, f"{place}_end", end)
            w.line(unroll)
            w.open(f"for ({self.small} {self.tap(k)} = 0; {self.tap(k)} < {window.count}; ++{self.tap(k)})")
            self.constant(t, place, f"{place}_begin + {self.tap(k)}")
            return [] if window.alike else [f"{place} < {place}_end"]
        many, tap, positions = self.patch[k], self.tap(k), self.space.outer[self.windows[k][0]]
        count = width(window, many)
        if count > 1:
            w.line(unroll)
            begin = self._lane(k).removeprefix(" + ") or "0"
            w.open(f"for ({self.small} {tap} = {begin}; {tap} < {count}; {self._next(k, tap)})")
        tap = tap if count > 1 else "0"
        if many > 1 or isinstance(window, Sliding):
            step = window.dilation if many == 1 else 1
            slides = isinstance(window, Sliding)
            first = (position, window.stride) if slides else (quotient(position, window.stride), 1)
            self.constant(t, place, linear([first, (tap, step)], window.shift))
            highest = (Edge(positions, many).tiles - 1) * window.fresh(many) + window.span(many) - 1 + window.shift
            return _within(place, t, window.shift < 0, most(highest - window.size) >= 0, window.size)
        reached = linear([(position, 1)], window.before)
        at = quotient(reached, window.stride)
        self.constant(t, place, at if tap == "0" else f"{at} - {tap}")
        highest = (positions - 1 + window.before) // window.stride
        lowest = window.before // window.stride - (count - 1)
        found = _within(place, t, least(lowest) < 0, most(highest - window.size) >= 0, window.size)
        offset = linear([(position, 1), (place, -window.stride)], window.before)
        if window.reach % window.stride:
            found.append(f"{offset} < {window.reach}")
        if window.dilation > 1:
            found.append(f"({offset}) % {window.dilation} == 0")
        holds = self.inside(found, f"{place.removeprefix('in_')}_holds")
        return [holds] if holds else []

    def _lane(self, k: int) -> str:
        """Returns what a thread adds to its first position along a window that it shares."""
        return f" + {self.small}({coordinate('lane', self.shares, k)})" if self.shares[k] > 1 else ""

    def _next(self, k: int, position: str) -> str:
        """Returns the C expression by which a thread goes on along a window."""
        return f"{position} += {self.shares[k]}" if self.shares[k] > 1 else f"++{position}"

    def inside(self, conditions: list[str], name: str = "inside") -> str:
        """Writes whether the current element exists; returns the C expression, "" if it always does."""
        if len(conditions) < 2:
            return "".join(conditions)
        self.constant("bool", name, " && ".join(conditions))
        return name

    def _source(self, k: int) -> str:
        back = len(self.windows) - 1 - k + self.beyond
        return f"in_{POSITIONS[back]}" if back < len(POSITIONS) else f"in_window{self.windows[k][0]}"

    def tap(self, k: int) -> str:
        back = len(self.windows) - 1 - k + self.beyond
        if self.patch[k] > 1:
            return _PLACES[back]
        return _TAPS[back] if back < len(_TAPS) else f"k{k}"

    def constant(self, kind: str, name: str, value: str) -> None:
        """Writes a constant, unless it is in scope already: that of a window of one element, which has no loop."""
        if name not in self._scope:
            self.w.line(f"const {kind} {name} = {value};")
            self._scope[name] = self.w.depth

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Closes the loops that are opened inside of the ``with`` statement."""
        with self.w.scope():
            yield
        self._scope = {name: depth for name, depth in self._scope.items() if depth <= self.w.depth}

    def hold(self, first: int, conditions: list[str]) -> dict[int, str]:
        """Writes the reads of all elements under the thread's windows; returns their C names, by load."""
        w, space = self.w, self.space
        held: dict[int, str] = {}
        strips = {n for n in space.taps if is_strip(space, self.s, n)}
        sizes = [width(window, m) for (_, window), m in zip(self.windows, self.patch)][first:]
        many = [f"[{size}]" if size > 1 else "" for size in sizes]
        for n in space.taps:
            operand = self.program.loads[n]
            if n in strips:
                held[n] = self.names.unique(operand.name, "_strips")
                w.line(f"Strip<{operand.dtype.ctype}, {self._strip()}> {held[n]}{''.join(many[:-1])};")
            else:
                held[n] = self.names.unique(operand.name, "_under")
                w.line(f"{vector_type(operand, self.count(n))} {held[n]}{''.join(many)};")
        variables = [f"[{self.tap(k)}]" if size > 1 else "" for k, size in enumerate(sizes, first)]
        if strips:
            with self.scope():
                inside = self.inside(conditions + self.open_taps(first, len(self.windows) - 1), "row_inside") or "true"
                window = self.windows[-1][1]
                assert not isinstance(window, Adaptive)
                col = self.at[self.windows[-1][0]]
                slides = isinstance(window, Sliding)
                origin = linear([(col, window.stride)]) if slides else quotient(col, window.stride)
                for n in sorted(strips):
                    operand = self.program.loads[n]
                    sources = [*self.sources()[:-1], origin]
                    start = plus(self.pointers.loads[n], self.offset(operand.strides, [*self.at, *sources]))
                    columns = f"{self.t}({origin}), {self.t}({window.size})"
                    target = f"{held[n]}{''.join(variables[:-1])}"
                    w.line(f"{target} = load_strip<{self._strip()}>({inside}, {start}, {columns});")
        if len(strips) < len(space.taps):
            with self.scope():
                inside = self.inside(conditions + self.open_taps(first, len(self.windows)))
                for n in space.taps:
                    if n not in strips:
                        self.read(n, f"{held[n]}{''.join(variables)}", inside)
        last = f"[{self.tap(len(self.windows) - 1)}]"  # a strip has it, even of one element
        rows = "".join(variables[:-1])
        return {n: f"{name}{rows}{last if n in strips else ''.join(variables[-1:])}" for n, name in held.items()}

    def _strip(self) -> str:
        """Returns the template arguments of a strip: elements to the left, in the middle, to the right."""
        window = self.windows[-1][1]
        assert not isinstance(window, Adaptive)
        middle = window.fresh(self.s.cols)
        right = max(width(window, self.s.cols) + window.shift - middle, 0)
        return f"{-window.shift}, {middle}, {right}"

    def sources(self) -> list[str]:
        return [self._source(k) for k in range(len(self.windows))]

    def count(self, n: int) -> int:
        """Returns how many elements of a load a thread holds for a vector."""
        return 1 if self.program.loads[n].strides[self.space.rank - 1] == 0 else self.s.vector

    def read(self, n: int, target: str, inside: str) -> None:
        """Writes the read of a vector of a load at the current elements; zeros where they do not exist."""
        w, operand, pointer = self.w, self.program.loads[n], self.pointers.loads[n]
        count = self.count(n)
        coordinates = [*self.at, *self.sources()]
        offset = self.offset(operand.strides, coordinates, operand.start)
        place = plus(pointer, offset)
        step = operand.strides[self.space.rank - 1]
        if count > 1 and step != 1:
            if target.startswith("const "):
                target = target.removeprefix("const ")
                w.line(f"{target};")
                target = target.split()[-1]
            at = plus(place, linear([("e", step)]))
            w.each_element(count, f"{target}[e] = {f'load_if<1>({inside}, {at})[0]' if inside else f'*({at})'};")
        elif inside:
            w.line(f"{target} = load_if<{count}>({inside}, {place}){'' if count > 1 else '[0]'};")
        else:
            read(w, target, pointer, offset, count)

    def offset(self, strides: tuple[int, ...], coordinates: list[str], start: int = 0, *, element: bool = False) -> str:
        """Returns the C expression of an offset; with ``element``, that of neighbour ``e``."""
        terms = list(zip(coordinates, strides))
        if element and self.s.vector > 1:
            terms.append(("e", strides[self.space.rank - 1]))
        return linear(terms, start)


def quotient(text: str, divisor: int) -> str:
    if divisor == 1 or text == "0":
        return text
    return f"{text if text.isalnum() else f'({text})'} / {divisor}"


def _within(place: str, itype: str, negative: bool, beyond: bool, size: int) -> list[str]:
    """Returns the conditions under which a place that may be negative, or too large, lies in [0, ``size``)."""
    if negative and beyond:
        return [f"{unsigned(itype)}({place}) < {size}"]
    return [f"{place} >= 0"] if negative else [f"{place} < {size}"] if beyond else []
