"""What all forms of attention's gradients share: which tiles meet, and the program on scores; rows are either side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.scores import Scores
from codegen.epilogue import Epilogue, Run
from codegen.expr import Operand, Program, Store
from codegen.iteration import extent, index_type, linear
from codegen.naming import Names, Writer


def without_places(spec: AttentionBackwardSpec) -> AttentionBackwardSpec:
    """The same with programs whose stores are registers."""
    a = spec.attention
    nowhere = (0,) * (len(a.batch) + 2)

    def moved(program: Program) -> Program:
        stores = tuple(Store(replace(s.operand, strides=nowhere), s.value) for s in program.stores)
        return replace(program, stores=stores)

    weight = None if a.weight is None else moved(a.weight)
    a = replace(a, program=moved(a.program), inside=moved(a.inside), weight=weight, ranges=())
    return replace(spec, attention=a)


class BackwardScores(Scores):
    """Writes what depends on the spec alone, for tiles of ``height`` rows and ``width`` columns.

    C variables: ``r0`` and ``c0``, the first row and column of a tile; ``b0``, ``b1``, ... as in `Scores`.
    """

    def __init__(self, w: Writer, spec: AttentionBackwardSpec, names: Names, height: int, width: int) -> None:
        self.whole, self.height, self.width = spec, height, width
        super().__init__(w, spec.attention, names, width if spec.queries else height)
        if not spec.queries:
            self.ragged = False  # what becomes of keys that do not exist is not stored
        self.differ = bool(spec.attention.bounds) or self.ragged
        for epilogue in (self.edge, self.inner):
            epilogue.pointers.stores = ["score", "slope_of"][: 1 + spec.sloped]
        if self.weight is not None:
            self.weight.pointers.stores = ["weighted"]

    def _reach(self) -> bool:
        a, spec = self.spec, self.whole
        sizes = {"q": (a.rows, a.depth), "k": (a.keys, a.depth), "v": (a.keys, a.width), "out": (a.rows, a.width)}
        places = [extent((*a.batch, *size), getattr(a, key).strides) for key, size in sizes.items()]
        own: list[tuple[Operand | None, tuple[int, int]]] = [
            (spec.first, (spec.rows, a.depth)),
            (spec.second, (spec.rows, a.width)),
            (spec.by_scores, (a.rows, a.keys)),
        ]
        places += [extent((*a.batch, *size), op.strides) for op, size in own if op is not None]
        places += [extent((*a.batch, a.rows), op.strides) for op in (spec.shift, spec.delta)]
        places += [extent(a.space, op.strides) for op in a.loads]
        return index_type(*(2 * n for n in places)) == "uint32"

    @property
    def plain(self) -> bool:
        """Whether the score where no bound is broken is the product itself, and has the slope 1."""
        return super().plain and not self.whole.sloped

    def met(self) -> None:
        """Writes ``first`` and ``last``: of the tiles of columns, those from first to last - 1 are met by the rows."""
        spec = self.whole
        if spec.queries:
            self.keys_met("r0", self.height)
            return
        a, w = self.spec, self.w
        tiles = -(-a.rows // self.width)
        ends = f"min(r0 + {self.height - 1}, {a.keys - 1})" if a.keys % self.height else f"r0 + {self.height - 1}"

        def most(number: int, sign: int = 1) -> str:
            """The largest key * j + start of the keys, or what is to be added to it for 0."""
            bound = a.bounds[number]
            terms, constant = self._start(number, bound)
            if bound.key:
                terms = [(f"({ends})" if bound.key > 0 else "r0", bound.key), *terms]
            return linear([(text, sign * step) for text, step in terms], sign * constant)

        first, last = "0", str(tiles)
        rest = []
        for n, bound in enumerate(a.bounds):
            if bound.row > 0:
                text = f"max(0, {most(n, -1)}) / {self.width}"
                first = text if first == "0" else f"max({first}, {text})"
            elif bound.row < 0:
                last = f"min({last}, max(0, {most(n)} + {self.width}) / {self.width})"
            else:
                rest.append(f"{most(n)} < 0")
        if rest:
            last = f"{' || '.join(rest)} ? 0 : {last}"
        w.line(f"const int first = {first}, last = {last};  // tiles of queries that the keys may meet")

    def unbroken(self, top: str, group: int) -> str:
        """The C condition under which no bound is broken by ``group`` rows from ``top`` on and a tile of columns."""
        if self.whole.queries:
            return self.inside(top, group, "c0")
        self.keys = group
        return self.inside("c0", self.width, top)

    def element(self, row: str, col: str, product: str, *, inside: bool, count: int) -> None:
        """Writes ``score``, and ``slope_of`` if it is not 1, of ``count`` columns from ``col`` on; product is text."""
        starts = {"score": f"-infinity<{self.spec.program.real}>()", **({"slope_of": ""} if self.whole.sloped else {})}
        guarded = not inside and self.ragged
        self._evaluate(self.inner if inside else self.edge, starts, row, col, product, guarded=guarded, count=count)

    def weigh(self, row: str, col: str, value: str, *, count: int) -> None:
        """Writes ``weighted``, what becomes of probabilities or of products with the loss: see `element`."""
        assert self.weight is not None
        guarded = self.ragged and any(op.strides[-1] for op in self.weight.program.loads)
        self._evaluate(self.weight, {"weighted": ""}, row, col, value, guarded=guarded, count=count)

    def _evaluate(
        self,
        epilogue: Epilogue,
        starts: Mapping[str, str],
        row: str,
        col: str,
        value: str,
        *,
        guarded: bool,
        count: int,
    ) -> None:
        """Writes a program on ``count`` values; starts are the C variables of its results, and what they are of keys
        that do not exist, if they are ``guarded``.
        """
        w, a, spec, real = self.w, self.spec, self.whole, self.spec.program.real
        of_rows, of_keys = (any(op.strides[axis] for op in epilogue.program.loads) for axis in (-2, -1))
        m, n = (row, col) if spec.queries else (col, row)
        if spec.queries:
            if spec.rows % self.height and of_rows:
                m = f"min({m}, {self.t}({a.rows - 1}))"
        elif spec.rows % self.height and of_keys:
            n = f"min({n}, {self.t}({a.keys - 1}))"
        if count == 1:
            every = (f"{name}[1] = {{{start if guarded else ''}}}" for name, start in starts.items())
            w.line(f"{real} {', '.join(every)};")
            if guarded:
                w.open(f"if ({n} < {a.keys})")
            if not spec.queries and a.rows % self.width and of_rows:
                m = f"min({m}, {self.t}({a.rows - 1}))"
            epilogue.results([*self.batch, m, n], [value])
            if guarded:
                w.close()
            return
        for name, start in starts.items():
            begin = f" = {{{{{', '.join([start] * count)}}}}}" if start else " = {}"
            w.line(f"Vector<{real}, {count}> {name}{begin if guarded else ''};")
        along = len(a.batch) + int(spec.queries)
        missing = (lambda e: f"{n} + {e} >= {a.keys}") if guarded else None
        clamped = None
        if not spec.queries and a.rows % self.width and of_rows:
            missing, clamped = (lambda e: f"{m} + {e} >= {a.rows}"), f"min({m} + e, {self.t}({a.rows - 1}))"
        run = Run(count, along, "e", missing, clamped)
        epilogue.results([*self.batch, m, n], [value], run, staged=list(starts))

    def query_place(self, op: Operand, query: str) -> str:
        """Where a number of a query lies."""
        return linear([*zip(self.batch, op.strides), (query, op.strides[-1])])
