"""Random numbers in a program on probabilities: words that lanes compute for each other, and compare as integers.

Dropout asks whether a random number is at least some probability.  A number is the upper 24 bits of a word, and a
probability a multiple of 2^-24, so that words are compared with 2^32 times the probability.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.expr import Index, Literal, Program, Result, fill
from codegen.kernel import uses

_UNIFORM = re.compile(r"philox::uniform<float>\((\{0\}), 0, (.+), (.+)\)")


@dataclass(frozen=True)
class RandomWords:
    """index       the program's index that counts the numbers.
    uniform     the instruction that makes them.
    kept        the instructions that compare them, and the words that are the least to pass.
    """

    index: int
    uniform: int
    kept: dict[int, int]

    def numbers(self, program: Program, seed: list[str]) -> tuple[str, str]:
        """The C expressions of seed and offset; ``seed`` are those of the arguments of the instruction."""
        found = _UNIFORM.fullmatch(program.instructions[self.uniform].template)
        assert found is not None
        return fill(found[2], seed), fill(found[3], seed)


def random_words(program: Program) -> RandomWords | None:
    """How a program's random numbers can be made sixteen neighbours at a time; None if it has none, or others."""
    every = [k for k, i in enumerate(program.instructions) if "philox::" in i.template]
    if len(every) != 1:
        return None
    instruction = program.instructions[every[0]]
    index = instruction.args[0]
    if _UNIFORM.fullmatch(instruction.template) is None or not isinstance(index, Index):
        return None
    *others, step = program.indices[index.index]
    if step != 1 or any(n % 4 for n in others):
        return None
    kept: dict[int, int] = {}
    for k, i in enumerate(program.instructions):
        if i.template == "{0} >= {1}" and i.args[0] == Result(every[0]) and isinstance(i.args[1], Literal):
            kept[k] = int(float(i.args[1].value) * 2**32)
    if uses(program).get(Result(every[0]), 0) != len(kept):
        return None
    return RandomWords(index.index, every[0], kept)
