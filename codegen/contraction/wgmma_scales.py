"""The factors of codes in the Hopper kernels: the producer's threads compute those of a tile for every stage."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.contraction.wgmma_block import Block
from codegen.contraction.wgmma_layout import GROUP
from codegen.contraction.wgmma_loads import Loads, MappedWriter
from codegen.iteration import coordinate, linear, signed_index_type, split
from codegen.kernel import parameter
from codegen.prologue import Prologue
from codegen.scaled_tiles import Factors, ScaledOperand


class ScaledWriter(MappedWriter):
    """An operand of codes that TMA brings, and of factors that threads bring; without a ``loader`` it has none."""

    def __init__(self, loads: Loads, label: str, side: ScaledOperand, tensors: Sequence[str], element: str) -> None:
        super().__init__(loads, label, side, tensors, element)
        self.loader = ScaleLoader(loads.block, label, side.factors) if side.factors is not None else None
        if self.loader is not None:
            self.parameters = [*self.parameters, *self.loader.parameters]


class ScaleLoader:
    """Writes how a warpgroup brings the factors of a tile's rows or columns to a stage: what it needs for the next
    stage is on its way meanwhile.
    """

    def __init__(self, block: Block, label: str, factors: Factors) -> None:
        self.block, self.w, self.label, self.factors = block, block.w, label, factors
        self.prologue = prologue = Prologue(block.w, factors.gather, block.w.names, label)
        own = zip(factors.arguments, prologue.operands, prologue.pointers)
        self.parameters = [(parameter(op, name), n) for n, op, name in own]
        rows = label == "a"
        self._edge, self._sizes = (block.m, block.spec.m) if rows else (block.n, block.spec.n)
        self._each = 1 if rows else factors.together(self._edge.size)
        (self._count,) = block.layout.factors[f"{label}_scale"].shape
        #: how many a thread brings
        self._times = -(-self._count // GROUP)
        spec = block.spec
        self.t = signed_index_type(*(2 * x for x in factors.gather.reaches(spec.batch, self._sizes, spec.k)))

    def prepare(self) -> None:
        """Writes where the factors of a thread's rows or columns begin."""
        w, spec, gather, p = self.w, self.block.spec, self.factors.gather, self.label
        axis, many = "m" if p == "a" else "n", self._times > 1
        if many:
            starts = ", ".join(f"{name}[{self._times}]" for name, _ in self.prologue.starts)
            w.line(f"{self.t} {starts};")
        with w.repeated("i", self._times):
            place = linear([(f"{axis}0", 1), ("t", self._each), ("i" if many else "0", GROUP * self._each)])
            w.line(f"const {self.t} {p}_{axis} = min({self.t}({place}), {self.t}({self._edge.total - 1}));")
            outer = split(w, self.t, f"{p}_{axis}_", f"{p}_{axis}", self._sizes, gather.steps()[1])
            several = self.block.batch > 1
            batch = [coordinate("batch", spec.batch, d) if several else "0" for d in range(len(spec.batch))]
            self.prologue.begin(self.t, "[i]" if many else "", batch, outer)

    def registers(self) -> None:
        """Declares what is on its way."""
        for source in self.prologue.sources:
            self.w.line(f"{source.ctype} {source.next}{f'[{self._times}]' if self._times > 1 else ''};")

    def fetch(self, k: str) -> None:
        """Writes the reads of what the factors of stage ``k`` are computed from."""
        sizes = self.factors.sizes
        with self.w.repeated("i", self._times):
            block = k if self.factors.stages == 1 or not sizes else f"({k} / {self.factors.stages})"
            inner = [coordinate(block, sizes, d) for d in range(len(sizes))]
            for source in self.prologue.sources:
                steps = self.prologue.place(source).inner
                text = linear([self.prologue.start(source, self._at), *zip(inner, steps)])
                value = f"{source.pointer}[{text}]" if source.pointer else f"int32({text})"
                self.w.line(f"{source.next}{self._at} = {value};")

    def renew(self, k: str) -> None:
        """Writes the factors of a stage to shared memory, and the reads for stage ``k``."""
        w = self.w
        with w.guarded(f"t < {self._count}" if self._count < GROUP else ""), w.repeated("i", self._times):
            text = self.prologue.element({source.value: source.next + self._at for source in self.prologue.sources})
            place = linear([("t", 1), ("i" if self._at else "0", GROUP)])
            w.line(f"shared.{self.label}_scale[stage.index][{place}] = {text};")
        self.fetch(k)

    @property
    def _at(self) -> str:
        return "[i]" if self._times > 1 else ""
