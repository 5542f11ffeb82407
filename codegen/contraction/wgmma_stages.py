"""What it takes the Hopper kernels to bring a stage: by TMA, by threads that fill tiles or split what they read, or by
consumers that compute an operand.
"""

from __future__ import annotations

import re
from math import gcd

from codegen.arch import LINE_BYTES, SECTOR_BYTES
from codegen.bf16x6 import PARTS, PRODUCTS, TERMS
from codegen.contraction.wgmma_layout import GROUP_ROWS, PIECES, Layout
from codegen.expr import Program
from codegen.operands import ComputedOperand, Gathered, MappedOperand, ReductionPanels, panel_size
from codegen.target import Target
from codegen.tile_path import TilePath

#: The share of the L2 cache's rate that sparse products are counted with, which ask for up to twice as much of it as
#: dense ones were ever measured to take.  Not measured.
SPARSE_L2_SHARE = 0.7
#: Cycles of a warp's copy of 32 pieces; the factor if it rounds them; cycles of TMA for a row of a panel.
GATHER, ROUNDED, PANEL_ROW = 16.0, 1.5, 2.0
#: How much longer a row of a panel takes that lies in two lines of the L2 cache.
SECOND_LINE = 0.8
#: Cycles of TMA for a row of windows, and for one of the filters beside them; for both if some channels of the panel do
#: not exist; how much longer short rows of windows take.
WINDOW_ROW, FILTER_ROW, PARTIAL_ROW, SHORT_ROW = 3.1, 1.0, 6.0, 1.4
#: Instructions in a cycle of a warpgroup whose threads fill tiles, and of any number of such warpgroups; cycles until
#: the data for a tile arrive; instructions for a piece of 16 bytes besides those of its elements, for a function, and
#: for one of those that take more, as PTX has them in float32.
FILL_RATE, MOST_FILL_RATE, FILL_LATENCY = 75.0, 110.0, 1600.0
FILL_PIECE, FUNCTION, LONG_FUNCTION = 12.0, 20.0, 37.0
#: How much longer one such warpgroup takes than two, whatever it waits for: half as much is in flight.  And any number
#: of them beside three consumers, which leave them fewer registers and issue more themselves.
ONE_FILLS, THREE_CONSUME = 1.15, 1.25
#: Instructions that splitting an element takes; cycles of the L1 cache for a thread's read of a line of its own, and
#: such reads for a piece whose elements are read one by one; how much longer such a piece takes if the elements are of
#: several taps of windows.
SPLIT_ELEMENT, LINE, FAR, WINDOW_ELEMENTS = 20.0, 0.25, 8, 3.0
#: Bytes of sectors that the L2 cache sends to each multiprocessor in a cycle.
SECTOR_RATE = 20.0
#: Instructions of a thread around each fragment that it computes, and for each tensor that it is computed from; cycles
#: of latency besides these instructions; instructions that converting an integer takes; instructions that a quarter of
#: a multiprocessor issues in a cycle.
FRAGMENT, FRAGMENT_SOURCE, FRAGMENT_LATENCY, INTEGER, ISSUE = 12.0, 3.0, 100.0, 8.0, 0.8
#: Bytes that shared memory moves in a cycle; bytes of each of its reads and writes.
SHARED_RATE, SHARED_ACCESS = 116.0, 128


def filling(layout: Layout) -> float:
    """Returns the estimated cycles in which the producer's threads fill a stage; 0 if they do not.

    The data for a stage are in flight for as long as it takes to fill the one before.
    """
    s, parts, instructions, lines, sectors = layout.s, layout.parts, 0.0, 0.0, 0.0
    for way, size in ((parts.a, s.tile_m), (parts.b, s.tile_n * layout.spec.products)):
        if isinstance(way, TilePath):
            gather, copies = way.gather, way.piece / way.vector - 1
            integers = INTEGER * sum(op.dtype.is_int for op in gather.operands)
            piece = FILL_PIECE + 4 * len(gather.limits) + way.piece * (1.0 + instructions_of(gather.program) + integers)
            piece += copies * 4 * len(gather.operands)
            if way.parts > 1:
                piece += SPLIT_ELEMENT * way.piece
                piece *= WINDOW_ELEMENTS if gather.limits and way.vector == 1 else 1.0
                lines += size * parts.reduction.panel / way.piece * (FAR if _far(way) else 2) * LINE
            if _far(way):
                apart = abs(way.gather.inner[-1]) * way.gather.operand.dtype.itemsize
                sectors += size * parts.reduction.panel * min(apart, SECTOR_BYTES)
            instructions += size * parts.reduction.panel / way.piece * piece
    if not instructions:
        return 0.0
    rate = min(FILL_RATE * s.producer_warpgroups, MOST_FILL_RATE)
    slower = ONE_FILLS if s.producer_warpgroups == 1 else 1.0
    slower *= THREE_CONSUME if s.groups == 3 else 1.0
    return slower * max(instructions / rate, lines, sectors / SECTOR_RATE, FILL_LATENCY)


def _far(way: TilePath) -> bool:
    """Tells whether a thread reads the elements of a piece one by one, and its neighbours others that are far away."""
    return way.along_k and way.threads_along_k and way.vector == 1


def split_traffic(layout: Layout) -> float:
    """Returns the bytes that shared memory moves for a stage of operands that are split.

    They come through the L1 cache and are written in parts.  Every consumer loads those of its rows of A; each of its
    products reads one of B.
    """
    s, k = layout.s, layout.parts.reduction
    lines = s.tile_m + s.tile_n * layout.spec.products
    read = s.groups * (GROUP_ROWS * PARTS + s.tile_n * layout.spec.products * PRODUCTS) * k.row
    return layout.ring.stage_bytes + lines * TERMS * 4 + read


def sparse_traffic(layout: Layout) -> float:
    """Returns the bytes that shared memory moves for a stage of a sparse operand A.

    Each product of 64 rows reads half as much of A as of as many terms of B, in half of the time that a dense one
    takes: shared memory is busy all the while.  What TMA writes meanwhile is counted by half: that is not measured.
    """
    s, k = layout.s, layout.parts.reduction
    read = s.tile_m // GROUP_ROWS * (GROUP_ROWS // 2 + s.tile_n) * k.row
    return read + layout.ring.stage_bytes / 2


def computing(layout: Layout) -> float:
    """Returns the estimated cycles in which the consumers compute the four fragments of a stage; 0 if they do not.

    Consumers share the multiprocessor's quarters.  They share shared memory with TMA and with the tensor cores, which
    read operand B for every consumer.  A consumer computes one fragment at a time.
    """
    operand, s, ring = layout.parts.a, layout.s, layout.ring
    if not isinstance(operand, ComputedOperand):
        return 0.0
    traffic = ring.stage_bytes + s.groups * ring["b"].stage_bytes
    for b in operand.brought:
        traffic += 4 * 4 * s.groups * 2 * SHARED_ACCESS if b.row else b.bytes(s.tile_m)
    sources = len(operand.brought) * FRAGMENT_SOURCE
    integers = sum(not b.row and operand.gather.operands[b.load].dtype.is_int for b in operand.brought)
    each = instructions_of(operand.gather.program)
    instructions = FRAGMENT + sources + (4 * each if operand.pairs else 8 * (1.0 + each + INTEGER * integers))
    return max(4 * instructions * s.groups / ISSUE, 4 * (instructions + FRAGMENT_LATENCY), traffic / SHARED_RATE)


#: A call of a function that takes many instructions.
_FUNCTION = re.compile(r"math::(?!relu|maximum|minimum|abs|leaky_relu|clamp|fma|wrapping)")

_LONG = re.compile(r"math::(gelu\(|gelu_backward|erf|softplus|log)")


def instructions_of(program: Program | None) -> float:
    """Returns how many instructions computing an element takes."""
    templates = [i.template for i in program.instructions] if program else []
    functions = (LONG_FUNCTION if _LONG.search(text) else FUNCTION for text in templates if _FUNCTION.search(text))
    return sum(functions) + 0.8 * sum(_FUNCTION.search(text) is None for text in templates)


def loading(layout: Layout, target: Target) -> float:
    """Returns the estimated cycles in which a stage is brought, as far as nothing is computed."""
    s, parts, k = layout.s, layout.parts, layout.parts.reduction
    rate = SPARSE_L2_SHARE * target.l2_rate if k.sparse else target.l2_rate
    across = _lines_of_row(parts.a, s.tile_m, k), _lines_of_row(parts.b, s.tile_n, k)
    tiles = [buffer.stage_bytes for buffer in layout.ring]
    again = sum((n - 1.0) * nbytes for n, nbytes in zip(across, tiles)) if len(tiles) == len(across) else 0.0
    loads = (sum(tiles) + again + layout.single_rows.stage_bytes) / rate
    if s.gather:
        return loads + s.tile_m * PIECES / 32 * GATHER * across[0] * (ROUNDED if k.itemsize == 4 else 1.0)
    # TMA takes as long for a short row as for one of 128 bytes.
    rows = 1 if parts.b.along_k else k.panel / panel_size(s.tile_n, k.itemsize)
    mapped = parts.a if isinstance(parts.a, MappedOperand) else None
    lines = mapped.lines(s.tile_m, parts.rows) if mapped else s.tile_m
    narrow = k.panel / mapped.width if mapped and mapped.width else 1.0
    ours, theirs = lines * narrow * min(narrow, SHORT_ROW), s.tile_n * layout.spec.products * rows
    ours, theirs = ours * across[0] * k.per_stage, theirs * across[1] * k.per_stage
    # The share of the panels of windows that it must fill with zeros behind the last channel.
    windows = mapped is not None and mapped.im2col and mapped.along_k
    partial = 1 / k.chunks if windows and k.channels % k.panel else 0.0
    every = ours * WINDOW_ROW + theirs * FILTER_ROW if windows else (ours + theirs) * PANEL_ROW
    return max(loads, every) * (1 - partial) + (ours + theirs) * PARTIAL_ROW * partial


def _lines_of_row(operand: object, size: int, k: ReductionPanels) -> float:
    """Returns how much longer a row of an operand's panels takes, on average, than one that lies in one line of the L2
    cache; the tile has ``size`` rows or columns.
    """
    elements = k.panel
    if isinstance(operand, Gathered):
        strides = [int(step) * k.itemsize for step in operand.image.steps]
    elif isinstance(operand, MappedOperand):
        strides = [*map(int, operand.map.strides)]
        elements = k.panel if operand.along_k else panel_size(size, k.itemsize)
    else:
        return 1.0
    step = gcd(LINE_BYTES, *strides)
    return 1.0 + SECOND_LINE * max(0, min(elements * k.itemsize, LINE_BYTES) - step) / LINE_BYTES
