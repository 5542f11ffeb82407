"""Specifications of direct convolutions and of the transforms of Winograd's algorithm: see `codegen.spec`."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.dtypes import SIZE_OF
from codegen.expr import Operand, Program
from codegen.spec import KernelSpec


@dataclass(frozen=True)
class DirectConvolutionSpec(KernelSpec):
    """A direct convolution with few channels per group: every input element is read into a halo tile once.

    images, groups           N and the number of groups.
    in_channels, filters     channels and filters of one group.
    sizes, out, taps         input, output and filter sizes of the three spatial dimensions (1 in front for 1-D and
                             2-D).
    stride, dilation, before per spatial dimension; before is the padding in front.
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

    @property
    def flat(self) -> bool:
        """Whether there are no more than two spatial dimensions."""
        return self.sizes[0] == self.taps[0] == self.out[0] == 1 and self.before[0] == 0

    @property
    def word(self) -> int:
        """Bytes of a sum."""
        return SIZE_OF[self.accumulate]

    def under(self, axis: int, outputs: int) -> int:
        """Returns how many input elements lie under so many neighbouring outputs along an axis, padding included."""
        return (outputs - 1) * self.stride[axis] + (self.taps[axis] - 1) * self.dilation[axis] + 1


@dataclass(frozen=True)
class WinogradSpec(KernelSpec):
    """One of the three linear transforms of Winograd's convolution: of patches of an image, of filters, or of products.

    transform         "input", "filter" or "output": B^T d B, G g G^T or A^T m A in `codegen/device/winograd.cuh`.
    tile              M, the number of results along a side of a tile: 2 or 4.
    images, channels  of an input or output, or the filters and channels of a filter.
    tiles             rows and columns of tiles of an image; (1, 1) for filters.
    source            strides over (image, channel, tile row, tile column, patch row, patch column), in elements.
    start             the offset in the source of the first element of all.
    window            input: for rows and columns (before, size); element i of the patch of tile t is t * tile + i -
                      before of the image, 0 outside of its size.  Else None: there is every element.
    results           output: rows and columns of results; those of tiles beyond are not written.  Else None.
    program           on every element of the transformed patch, over (image, channel, tile row, tile column, row,
                      column).
    """

    transform: str
    tile: int
    images: int
    channels: int
    tiles: tuple[int, int]
    source: Operand
    start: int
    window: tuple[tuple[int, int], tuple[int, int]] | None
    results: tuple[int, int] | None
    program: Program

    @property
    def sides(self) -> tuple[int, int]:
        """Elements along a side of a patch, before and after the transform."""
        whole = self.tile + 2
        return {"input": (whole, whole), "filter": (3, whole), "output": (whole, self.tile)}[self.transform]

    @property
    def space(self) -> tuple[int, ...]:
        """Sizes of the program's space."""
        return (self.images, self.channels, *self.tiles, self.sides[1], self.sides[1])
