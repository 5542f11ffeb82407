"""Probabilities and gradients as tensor cores leave them: what the forms of attention's gradients do with fragments.

C variables: ``s`` the scores of a tile, then the probabilities; ``d`` the products with the loss, then the gradients;
``slope``; ``factor`` and ``g_factor``, the same as factors; ``row`` the thread's first row in the block's
tile, which begins at ``r0``, ``lane``, ``unit``; shift and delta, numbers of the thread's rows if those are queries.
"""

from __future__ import annotations

from math import e, log2

from codegen.attention.backward_scores import BackwardScores
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.expr import Operand, literal
from codegen.iteration import linear
from codegen.naming import Names, Writer


class BackwardFragments(BackwardScores):
    """Tiles of ``height`` rows, of which ``group`` from ``top`` on are looked at together, and ``width`` columns."""

    def __init__(
        self, w: Writer, spec: AttentionBackwardSpec, names: Names, height: int, width: int, top: str, group: int
    ) -> None:
        super().__init__(w, spec, names, height, width)
        self.top, self.group, self.element_type = top, group, spec.attention.q.dtype.ctype

    def unit(self) -> None:
        self.w.line(f"const float unit = {literal(self.spec.scale * log2(e), 'float')};  // of a score, to base 2")

    def shift_of(self, name: str, query: str, exists: str) -> str:
        """The C expression of the shift of a query, to base 2; one that does not exist has no probabilities."""
        op = self.whole.shift
        text = f"{literal(log2(e), 'float')} * {_as_float(op, f'{name}[{self.query_place(op, query)}]')}"
        text = f"attention::shift({text})" if self.whole.guarded else text
        return f"{exists} ? {text} : infinity<float>()" if exists else text

    def delta_of(self, name: str, query: str, exists: str) -> str:
        op = self.whole.delta
        text = _as_float(op, f"{name}[{self.query_place(op, query)}]")
        return f"{exists} ? {text} : 0.0f" if exists else text

    def row_numbers(self, shift: str, delta: str) -> None:
        """Writes shift and delta of the thread's rows, which are queries."""
        w, spec = self.w, self.whole
        w.line("float shift[2], delta[2];")
        w.line("#pragma unroll")
        w.open("for (int f = 0; f < 2; ++f)")
        w.line(f"const {self.t} m = r0 + row + f * 8;")
        exists = f"m < {spec.rows}" if spec.rows % self.height else ""
        w.line(f"shift[f] = {self.shift_of(shift, 'm', exists)};")
        w.line(f"delta[f] = {self.delta_of(delta, 'm', exists)};")
        w.close()

    def literal(self, value: float) -> str:
        return literal(value, "float")

    @property
    def trivial(self) -> bool:
        """Whether all products are scores."""
        return self.plain and not self.differ

    def define(self) -> None:
        """Writes the function that makes scores of a tile's products, and the slopes."""
        w = self.w
        if self.trivial:
            return
        w.open("const auto scores = [&](int tile)")
        w.line(f"const int c0 = tile * {self.width};")
        if not self.differ:
            self._tile(inside=True)
        else:
            w.open(f"if ({self.unbroken(self.top, self.group)})")
            if self.plain:
                w.line("return;  // the products are the scores")
                w.close()
                self._tile(inside=False)
            else:
                self._tile(inside=True)
                w.close("} else {")
                w.depth += 1
                self._tile(inside=False)
                w.close()
        w.close("};")

    def _tile(self, *, inside: bool) -> None:
        w = self.w
        w.line("#pragma unroll")
        w.open(f"for (int j = 0; j < {self.width // 2}; j += 4)")
        w.line("#pragma unroll")
        w.open("for (int f = 0; f < 2; ++f)")
        w.line(f"const {self.t} m = r0 + row + f * 8, n = c0 + j * 2 + lane % 4 * 2;")
        self.element("m", "n", "s[j + f * 2 + e]", inside=inside, count=2)
        for k in range(2):
            w.line(f"s[j + f * 2{f' + {k}' if k else ''}] = score[{k}];")
        if self.whole.sloped:
            for k in range(2):
                w.line(f"slope[j + f * 2{f' + {k}' if k else ''}] = slope_of[{k}];")
        w.close()
        w.close()

    def probabilities(self, tile: str, shift: str) -> None:
        """Makes probabilities of a tile's products; shift is, of columns, a pointer to the numbers of the tile's."""
        w = self.w
        if not self.trivial:
            w.line(f"scores({tile});")
        w.line("#pragma unroll")
        if self.whole.queries:
            line = "s[i] = math::fast_exp2(unit * s[i] - shift[i / 2 % 2]);"
            w.line(f"for (int i = 0; i < {self.width // 2}; ++i) {line}")
        else:
            w.open(f"for (int j = 0; j < {self.width // 2}; j += 4)")
            w.line(f"const auto x = load_shared<2>({shift} + j * 2 + lane % 4 * 2);")
            w.line("#pragma unroll")
            w.line("for (int i = 0; i < 4; ++i) s[j + i] = math::fast_exp2(unit * s[j + i] - x[i % 2]);")
            w.close()
        if self.whole.second is not None:
            w.line(f"attention::round_to_fragments<{self.element_type}>(s, factor);")

    def gradients(self, tile: str, delta: str, by_scores: str, factor: str, ready: str = "") -> None:
        """Makes gradients of the products with the loss, then factors, for which the statement ``ready`` is waited."""
        w, spec = self.w, self.whole
        w.line("#pragma unroll")
        if spec.queries:
            w.line(f"for (int i = 0; i < {self.width // 2}; ++i) d[i] = s[i] * (d[i] - delta[i / 2 % 2]);")
        else:
            w.open(f"for (int j = 0; j < {self.width // 2}; j += 4)")
            w.line(f"const auto x = load_shared<2>({delta} + j * 2 + lane % 4 * 2);")
            w.line("#pragma unroll")
            w.line("for (int i = 0; i < 4; ++i) d[j + i] = s[j + i] * (d[j + i] - x[i % 2]);")
            w.close()
        if spec.by_scores is not None:
            op, a = spec.by_scores, self.spec
            w.line("#pragma unroll")
            w.open(f"for (int i = 0; i < {self.width // 2}; ++i)")
            n = f"{tile} * {self.width} + i / 4 * 8 + lane % 4 * 2 + i % 2"
            w.line(f"const {self.t} m = r0 + row + i / 2 % 2 * 8, n = {n};")
            place = linear([*zip(self.batch, op.strides), ("m", op.strides[-2]), ("n", op.strides[-1])])
            tests = [f"m < {a.rows}"] if a.rows % self.height else []
            tests += [f"n < {a.keys}"] if a.keys % self.width else []
            condition = f"if ({' && '.join(tests)}) " if tests else ""
            w.line(f"{condition}{by_scores}[{place}] = {_stored(op, 'd[i]')};")
            w.close()
        if spec.sloped:
            w.line("#pragma unroll")
            w.line(f"for (int i = 0; i < {self.width // 2}; ++i) d[i] *= slope[i];")
        if spec.first is not None:
            if ready:
                w.line(ready)
            w.line(f"attention::round_to_fragments<{self.element_type}>(d, {factor});")

    def store(self, sums: str, op: Operand, name: str, elements: int, width: int, factor: float) -> None:
        """Stores sums from registers: two neighbours at a time where they are one access."""
        w, spec = self.w, self.whole
        pairs = op.strides[-1] == 1 and elements % 2 == 0 and op.alignment % (2 * op.dtype.itemsize) == 0
        pairs = pairs and not any(x % 2 for x in op.strides[:-1])
        step = 2 if pairs else 1
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {width // 2}; i += {step})")
        last = "" if pairs else " + i % 2"
        w.line(f"const {self.t} m = r0 + row + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2{last};")
        place = linear([*zip(self.batch, op.strides), ("m", op.strides[-2]), ("n", op.strides[-1])])
        tests = [f"m < {spec.rows}"] if spec.rows % self.height else []
        tests += [f"n < {elements}"] if elements % width else []
        condition = f"if ({' && '.join(tests)}) " if tests else ""
        times = "" if factor == 1 else f"{literal(factor, 'float')} * "
        if pairs:
            w.line(f"Vector<{op.dtype.ctype}, 2> v;")
            w.line(f"v[0] = {_stored(op, f'{times}{sums}[i]')};")
            w.line(f"v[1] = {_stored(op, f'{times}{sums}[i + 1]')};")
            w.line(f"{condition}store({name} + {place}, v);")
        else:
            w.line(f"{condition}{name}[{place}] = {_stored(op, f'{times}{sums}[i]')};")
        w.close()


def _as_float(op: Operand, text: str) -> str:
    return text if op.dtype.ctype == "float" else f"convert<float>({text})"


def _stored(op: Operand, text: str) -> str:
    return text if op.dtype.ctype == "float" else f"convert<{op.dtype.ctype}>({text})"
