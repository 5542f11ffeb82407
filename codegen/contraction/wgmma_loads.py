"""The operands of the Hopper kernels that TMA brings: their parameters, and the loads of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from codegen.contraction.wgmma_block import Block, tidy
from codegen.iteration import coordinate, coordinates, linear, long
from codegen.operands import ROW_BYTES, MappedOperand, panel_size, round_up
from codegen.sizes import most
from codegen.sparse_tiles import BLOCK_ROWS, BLOCK_WORDS
from codegen.spec import TensorMap
from codegen.tensor_map import box_bytes

GRID_CONSTANT = "const __grid_constant__ TensorMap "
#: A parameter's declaration, and its argument: a tensor's number, or a tensor map.
Parameter = tuple[str, int | TensorMap]


class OperandWriter:
    """An operand in a kernel: its parameters, and the bytes that TMA brings of it to a stage, of ``windows`` or not."""

    def __init__(self, block: Block, parameters: Sequence[Parameter], bytes_: int = 0, windows: bool = False) -> None:
        self.block, self.w, self.parameters, self.bytes, self._windows = block, block.w, parameters, bytes_, windows

    def locate(self) -> None:
        """Writes where the windows of a tile begin."""
        if self._windows:
            coordinates(self.w, "int", "m_", "m0", self.block.spec.m)

    def load(self) -> None:
        """Writes the loads of a panel of a stage."""


class Loads:
    """Writes loads of TMA to the stages of the ring; the pipeline's trace is told of each.

    ahead  whether boxes are only brought to the L2 cache, for loads that follow.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.w, self.k = block, block.w, block.parts.reduction
        self.times = 1
        self.ahead = False

    @contextmanager
    def repeated(self, counter: str, count: int, *, always: bool = False) -> Iterator[None]:
        """Writes a loop around loads; none around one, unless ``always``."""
        self.times *= count
        with self.w.unrolled(f"for (int {counter} = 0; {counter} < {count}; ++{counter})", when=always or count > 1):
            yield
        self.times //= count

    def values(self, side: MappedOperand, origin: str, channel: str = "c") -> dict[str, str]:
        """Returns the C expressions of the placeholders in the coordinates of a load (`MappedOperand.terms`)."""
        values = {"c": channel, "o": origin, **self.block.batch_values()}
        values |= {f"t{d}": f"t{d}" if tap > 1 else "0" for d, tap in enumerate(self.k.taps)}
        if side.im2col:
            values |= {f"o{d}": f"m_{d}" for d in range(len(self.block.spec.m))}
            values |= {f"p{d}": f"p{d}" for d in range(len(side.pixels))}
        return values

    def walk(self, item: str) -> None:
        """Writes the channel and the taps of panel number ``item``."""
        w, k = self.w, self.k
        sizes = (*k.taps, k.chunks)
        if k.skips:
            chunk = self._walk_phase(item)
        else:
            coordinates(w, "int", "t", item, sizes, long(k.taps))
            chunk = coordinate(item, sizes, len(sizes) - 1)
        channel = f"{chunk} * {k.panel}" if most(k.chunks) > 1 else "0"
        if k.panels % k.per_stage:
            # Past the last panel both operands are read beyond their channels, where they are zero.
            channel = f"{item} < {k.panels} ? {channel} : {round_up(k.channels, 16 // k.itemsize)}"
        if k.step:
            channel = f"{self.block.batch_values()['b0']} * {k.step} + {channel}"
        w.line(f"const int c = {channel};")

    def _walk_phase(self, item: str) -> str:
        """Writes the taps of panel number ``item`` of a phase; returns the C expression of its chunk of channels."""
        w, k = self.w, self.k
        rest = f"{item} / {k.chunks}" if most(k.chunks) > 1 else item
        for d in reversed(range(len(k.taps))):
            if k.taps[d] == 1:
                continue
            skip = "" if k.skips[d] == "0" else f"skip{d}"
            count = f"({k.taps[d]} - {skip})" if skip else str(k.taps[d])
            first = all(size == 1 for size in k.taps[:d])
            w.line(f"const int t{d} = {rest if first else f'{rest} % {count}'}{f' + {skip}' if skip else ''};")
            rest = f"{rest} / {count}"
        return f"{item} % {k.chunks}" if most(k.chunks) > 1 else "0"


class TileLoads:
    """Writes the loads of a tile of ``size`` rows or columns, from ``origin`` on, to a member of the ring."""

    def __init__(
        self, loads: Loads, side: MappedOperand, box: TensorMap, member: str, origin: str, size: int, panels: int = 1
    ) -> None:
        self._loads, self._side, self._box, self._origin, self._size = loads, side, box, origin, size
        self._stage = f"shared.{member}[stage.index]"
        self._panel = f"{self._stage}[u]" if panels * loads.k.per_stage > 1 else self._stage
        self._channel = f"c + u * {box.box[0]}" if panels > 1 else "c"
        self._across = side.width or panel_size(size, loads.k.itemsize)
        across = self._windows_across if side.im2col else self._columns
        #: writes them, given the tensor map's name and where in the tile the first is
        self.write = self._rows if side.along_k else across

    def _load(self, target: str, name: str, values: dict[str, str]) -> None:
        """Writes a load, given the C expressions of the placeholders in its coordinates."""
        w, side = self._loads.w, self._side
        place = ", ".join(tidy(term.format(**values)) for term in side.terms)
        offsets = ", ".join(f"uint16({tidy(term.format(**values))})" for term in side.offsets)
        if self._loads.ahead:
            w.line(f"tma_prefetch_box({name}, {place});")
            return
        self._loads.block.ring.copied(self._loads.times * box_bytes(self._box))
        if side.im2col:
            w.line(f"tma_load_im2col({target}, {name}, full,")
            w.line(f"                {place}, {offsets});")
        else:
            w.line(f"tma_load({target}, {name}, full, {place});")

    def _rows(self, name: str, start: int = 0) -> None:
        """Writes the load of rows along the reduction, or of windows under a tap."""
        values = self._loads.values(self._side, self._origin, self._channel)
        self._load(f"{self._panel}{f'[{start}]' if start else ''}", name, values)

    def _columns(self, name: str, start: int = 0) -> None:
        """Writes the loads of panels across the reduction."""
        several = self._size > self._across
        origin = f"{self._origin} + i * {self._across}" if several else self._origin
        panel = linear([("i", 1)] if several else [], start // self._across)
        with self._loads.repeated("i", self._size // self._across):
            self._load(f"{self._stage}[{panel}]", name, self._loads.values(self._side, origin))

    def _windows_across(self, name: str, _: int = 0) -> None:
        """Writes the loads of panels of rows, each some channels of one tap, for the pixels of a stage."""
        loads, side, across = self._loads, self._side, self._across
        values = loads.values(side, self._origin, "channel")
        with loads.repeated("i", self._size // across, always=True):
            loads.w.line(f"const int panel = m0 / {across} + i;")
            for d, tap in enumerate(side.taps[:-1]):
                # Past the last row every tap is in range; the channel is not.
                inner = prod(side.taps[d + 1 :])
                values[f"t{d}"] = f"t{d}" if tap > 1 else "0"
                if tap > 1:
                    loads.w.line(f"const int t{d} = panel{f' / {inner}' if inner > 1 else ''} % {tap};")
            several = loads.block.batch > 1
            behind = round_up(side.map.sizes[0], 16 // loads.k.itemsize) if several else side.taps[-1] * across
            within = f"panel % {side.taps[-1]} * {across}"
            loads.w.line(f"const int channel = panel < {prod(side.taps)} ? {within} : {behind};")
            self._load(f"{self._stage}[i]", name, values)


class MappedWriter(OperandWriter):
    """An operand that is multiplied as it lies in memory, as an ``element``; ``tensors`` are the operands B's."""

    def __init__(self, loads: Loads, label: str, side: MappedOperand, tensors: Sequence[str], element: str) -> None:
        self._side, k = side, loads.k
        self._maps = [loads.w.names.unique(name, "_map") for name in tensors]
        edge = loads.block.m if label == "a" else loads.block.n
        self._size, lines = edge.size, side.lines(edge.size, edge.total)
        across = side.width or panel_size(edge.size, k.itemsize)
        halved = k.sparse and label == "a"
        panel, row = (k.panel // 2, ROW_BYTES // 2) if halved else (k.panel, ROW_BYTES)
        box = (panel, lines) if side.along_k else (across, panel)
        # Tensor cores truncate floats to tf32; that TMA rounds them costs nothing.
        made = side.boxed(*box, element="tf32" if element == "tf32" else "")
        self._loads = TileLoads(loads, side, made, label, "m0" if label == "a" else "n0", edge.size)
        named = enumerate(self._maps, side.map.argument)
        parameters = [(GRID_CONSTANT + name, replace(made, argument=n)) for n, name in named]
        super().__init__(loads.block, parameters, row * lines * len(tensors), side.im2col and side.along_k)

    def load(self) -> None:
        coordinates(self.w, "int", "p", "c", self._side.pixels)
        for number, name in enumerate(self._maps):
            self._loads.write(name, number * self._size)


class SparseWriter(OperandWriter):
    """An operand A of which half is stored, and the metadata beside it."""

    def __init__(self, loads: Loads, side: MappedOperand, tensor: str, element: str, metadata: MappedOperand) -> None:
        self._values, rows = MappedWriter(loads, "a", side, [tensor], element), loads.block.m.size
        self._name = loads.w.names.unique(tensor, "_metadata_map")
        made = replace(metadata.map, box=(BLOCK_WORDS, rows // BLOCK_ROWS, 1))
        self._loads = TileLoads(loads, metadata, made, "metadata", "m0", rows)
        parameters = [*self._values.parameters, (GRID_CONSTANT + self._name, made)]
        super().__init__(loads.block, parameters, self._values.bytes + box_bytes(made))

    def load(self) -> None:
        self._values.load()
        self._loads.write(self._name)
