"""The specification of direct convolutions: see `codegen.spec`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.arch import SECTOR_BYTES
from codegen.dtypes import SIZE_OF
from codegen.expr import Operand, Program
from codegen.iteration import packed
from codegen.records import once
from codegen.spec import KernelSpec


@dataclass(frozen=True)
class DirectConvolutionSpec(KernelSpec):
    """A direct convolution with few channels per group: every input element is read into a halo tile once.

    images, groups           N and the number of groups.
    in_channels, filters     channels and filters of one group.
    sizes, out, taps         input, output and filter sizes of the three spatial dimensions (1 in front for 1-D and
                             2-D).
    stride, dilation, before per spatial dimension; before is the padding in front.
    input_dilation           per spatial dimension; if more than 1, neighbouring elements of the input are so many
                             positions apart, with zeros between them: a gradient of a convolution with this stride.
    flip                     true convolution rather than cross-correlation.
    x                        strides over (image, group, channel, 3 spatial).
    w                        strides over (group, filter, channel, 3 taps).
    program                  over the space (image, group, filter, 3 spatial).
    """

    images: int
    groups: int
    in_channels: int
    filters: int
    sizes: tuple[int, int, int]
    out: tuple[int, int, int]
    taps: tuple[int, int, int]
    stride: tuple[int, int, int]
    dilation: tuple[int, int, int]
    before: tuple[int, int, int]
    flip: bool
    x: Operand
    w: Operand
    accumulate: str
    result: str
    program: Program
    input_dilation: tuple[int, int, int] = (1, 1, 1)

    @property
    def flat(self) -> bool:
        """Whether there are no more than two spatial dimensions."""
        return self.sizes[0] == self.taps[0] == self.out[0] == 1 and self.before[0] == 0

    @once
    def runs(self) -> tuple[int, int]:
        """In how many runs the planes lie in memory, and the planes of each: those of an image, or all there are.

        There are none where the planes of an image do not lie one behind the other.
        """
        sizes = (self.images, self.groups, 1, *self.sizes)
        if self.in_channels > 1 or not contiguous(self.x, sizes, 1):
            return 0, 0
        written = [store.operand for store in self.program.stores]
        apart = [op for op in written if contiguous(op, self.space, 1) and not contiguous(op, self.space)]
        joined = contiguous(self.x, sizes) and not apart
        return (1, self.images * self.groups) if joined else (self.images, self.groups)

    @once
    def across(self) -> tuple[bool, ...]:
        """Whether the channels of each output are closer in memory than the columns of a plane."""
        first = 1 if self.runs[0] > 1 else 0
        written = [store.operand for store in self.program.stores]
        return tuple(
            not contiguous(op, self.space, first) and (op.strides[1] < op.strides[5] or self.out[2] == 1)
            for op in written
        )

    @once
    def traffic(self) -> tuple[int, int]:
        """The bytes of the input that are read, and those that a kernel moves at least."""
        program, planes, size = self.program, self.images * self.groups, self.x.dtype.itemsize
        # Strides may leave out rows, and columns that are far enough apart in memory.
        apart = (True, True, self.x.strides[5] * size >= SECTOR_BYTES)
        met = [min(n, m * k) if skips else n for n, m, k, skips in zip(self.sizes, self.out, self.taps, apart)]
        read = planes * self.in_channels * prod(met) * size
        written = sum(store.operand.dtype.itemsize for store in program.stores) or size
        beside = sum(op.dtype.itemsize for op in program.loads if op.strides[1] and op.strides[5])
        return read, read + planes * self.filters * prod(self.out) * (written + beside)

    @property
    def space(self) -> tuple[int, ...]:
        """The space of the program."""
        return (self.images, self.groups, self.filters, *self.out)

    @property
    def word(self) -> int:
        """Bytes of a sum."""
        return SIZE_OF[self.accumulate]

    def under(self, axis: int, outputs: int) -> int:
        """Returns how many input elements lie under so many neighbouring outputs along an axis, padding included."""
        return (outputs - 1) * self.stride[axis] + (self.taps[axis] - 1) * self.dilation[axis] + 1


def contiguous(operand: Operand, sizes: tuple[int, ...], first: int = 0) -> bool:
    """Tells whether an operand lies without gaps, in the order of its dimensions from the ``first`` one on."""
    return all(a == b for a, b, n in zip(operand.strides[first:], packed(sizes[first:]), sizes[first:]) if n > 1)
