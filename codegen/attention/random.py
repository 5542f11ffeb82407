"""Random numbers in a program on probabilities: words that lanes compute for each other.

Dropout asks whether a random number, the upper 24 bits of a word times 2^-24, is at least n * 2^-24.  That is to ask
whether the word is at least 256 * n.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from codegen.expr import Index, Program, Value, fill
from codegen.iteration import linear

_COMPARED = re.compile(r"philox::at_least\(\{0\}, (0|\{1\}), (.+), (.+), (\d+)\)")


@dataclass(frozen=True)
class RandomWords:
    """Random words that a program compares with one number.

    steps     strides of the elements' numbers over the space.
    above     strides of their counters' second word, in tensors of 2^31 elements and more; else None.
    compared  the instruction that compares the words.
    least     the least word that is large enough.
    """

    steps: tuple[int, ...]
    above: tuple[int, ...] | None
    compared: int
    least: int

    @property
    def together(self) -> bool:
        """Whether sixteen neighbours that begin at a multiple of 16 share four counters."""
        return self.steps[-1] == 1 and not any(n % 4 for n in self.steps[:-1])

    def enough(self, word: str) -> str:
        """Returns the C expression of whether a word is large enough; "false" where everything is dropped."""
        return f"{word} >= {self.least}u" if self.least < 1 << 32 else "false"

    def numbers(self, program: Program, constant: Callable[[Value], str], place: Sequence[str]) -> list[str]:
        """Returns the C expressions of the counter's second word, the seed and the offset.

        ``constant`` returns the C expression of a value that is the same for all elements; ``place`` are the
        coordinates.
        """
        instruction = program.instructions[self.compared]
        found = _COMPARED.fullmatch(instruction.template)
        assert found is not None
        above = "0" if self.above is None else linear(list(zip(place, self.above)))
        arguments = ["" if isinstance(v, Index) else constant(v) for v in instruction.args]
        return [above, fill(found[2], arguments), fill(found[3], arguments)]


def random_words(program: Program) -> RandomWords | None:
    """Returns the random numbers that a program compares with one number; None if it has none, or others."""
    every = [k for k, i in enumerate(program.instructions) if "philox::" in i.template]
    if len(every) != 1:
        return None
    instruction = program.instructions[every[0]]
    index, found = instruction.args[0], _COMPARED.fullmatch(instruction.template)
    if found is None or not isinstance(index, Index):
        return None
    above = instruction.args[1] if found[1] != "0" else None
    if above is not None and not isinstance(above, Index):
        return None
    steps = None if above is None else program.indices[above.index]
    if steps is not None and any(steps[-2:]):
        return None
    return RandomWords(program.indices[index.index], steps, every[0], int(found[4]) << 8)
