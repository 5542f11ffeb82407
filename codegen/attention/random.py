"""Random numbers in a program on probabilities: words that lanes compute for each other.

Dropout asks whether a random number is at least a multiple of 2^-24: whether the upper 24 bits of a word are, which is
to say whether the word is at least 256 times that multiple.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.expr import Index, Program, fill

_COMPARED = re.compile(r"philox::at_least\(\{0\}, 0, (.+), (.+), (\d+)\)")


@dataclass(frozen=True)
class RandomWords:
    """index     the program's index that counts the numbers.
    compared  the instruction that compares them.
    least     the least word that is enough.
    """

    index: int
    compared: int
    least: int

    def numbers(self, program: Program, arguments: list[str]) -> tuple[str, str]:
        """The C expressions of seed and offset; ``arguments`` are those of the instruction's."""
        found = _COMPARED.fullmatch(program.instructions[self.compared].template)
        assert found is not None
        return fill(found[1], arguments), fill(found[2], arguments)


def random_words(program: Program) -> RandomWords | None:
    """How a program's random numbers can be made sixteen neighbours at a time; None if it has none, or others."""
    every = [k for k, i in enumerate(program.instructions) if "philox::" in i.template]
    if len(every) != 1:
        return None
    instruction = program.instructions[every[0]]
    index, found = instruction.args[0], _COMPARED.fullmatch(instruction.template)
    if found is None or not isinstance(index, Index):
        return None
    *others, step = program.indices[index.index]
    if step != 1 or any(n % 4 for n in others):
        return None
    return RandomWords(index.index, every[0], int(found[3]) << 8)
