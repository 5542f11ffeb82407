"""The specification of direct convolutions: see `codegen.spec`."""

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

    @property
    def word(self) -> int:
        """Bytes of a sum."""
        return SIZE_OF[self.accumulate]

    def under(self, axis: int, outputs: int) -> int:
        """Returns how many input elements lie under so many neighbouring outputs along an axis, padding included."""
        return (outputs - 1) * self.stride[axis] + (self.taps[axis] - 1) * self.dilation[axis] + 1
