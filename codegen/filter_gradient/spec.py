"""The specification of filter gradients: see `codegen.spec`."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.buffers import Edge
from codegen.dtypes import SIZE_OF
from codegen.expr import Operand, Program
from codegen.spec import KernelSpec


@dataclass(frozen=True)
class FilterGradientSpec(KernelSpec):
    """The gradient of a convolution's filter, of few channels and filters a group: sums over images and positions.

    parts                    how many partial sums there are of every result: each is over a run of bands.
    band                     rows of positions of a band: the bands of an image's planes lie one after the other.
    images, groups           N and the number of groups.
    channels, filters        channels and filters of one group.
    sizes, out, taps         sizes of image, positions and filter in the three spatial dimensions (1 where there are
                             fewer: in front, and for 1-D also behind).
    stride, dilation, before per spatial dimension; before is the padding in front.
    flip                     true convolution rather than cross-correlation.
    x                        strides over (image, group, channel, 3 spatial).
    loss                     strides over (image, group, filter, 3 positions).
    program                  over the space (part, group, filter, channel, 3 taps).
    """

    parts: int
    band: int
    images: int
    groups: int
    channels: int
    filters: int
    sizes: tuple[int, int, int]
    out: tuple[int, int, int]
    taps: tuple[int, int, int]
    stride: tuple[int, int, int]
    dilation: tuple[int, int, int]
    before: tuple[int, int, int]
    flip: bool
    x: Operand
    loss: Operand
    accumulate: str
    result: str
    program: Program

    @property
    def space(self) -> tuple[int, ...]:
        """Sizes of the program's space."""
        return (self.parts, self.groups, self.filters, self.channels, *self.taps)

    @property
    def words(self) -> int:
        """Registers of a sum."""
        return SIZE_OF[self.accumulate] // 4

    @property
    def depthwise(self) -> bool:
        """Whether every channel has one filter of its own."""
        return self.channels == self.filters == 1

    @property
    def bands(self) -> Edge:
        """The bands of all images, of which parts have so many at most."""
        every = self.images * self.out[0] * Edge(self.out[1], self.band).tiles
        return Edge(every, -(-every // self.parts))
