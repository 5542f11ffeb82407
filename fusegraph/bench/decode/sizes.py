"""The sizes of the decoders that are measured, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass

#: What matrices are: the bits of an element.
WEIGHTS = {"bf16": 16, "int8": 8, "int4": 4}
#: Neighbours in a row of a matrix of 4 bits that share a scale.
GROUP = 128


@dataclass(frozen=True)
class Size:
    """The sizes of a decoder; ``shared`` are its heads of keys and values."""

    layers: int
    width: int
    heads: int
    shared: int
    hidden: int
    vocabulary: int

    @property
    def depth(self) -> int:
        """Elements of a head."""
        return self.width // self.heads

    @property
    def elements(self) -> int:
        """Elements of the matrices that a step reads: those of layers, and the head."""
        layer = 2 * (self.heads + self.shared) * self.depth + 3 * self.hidden
        return self.width * (self.layers * layer + self.vocabulary)

    def cache_bytes(self, batch: int, length: int) -> int:
        """Bytes of the keys and values of so many tokens of so many texts, in 16 bits."""
        return 2 * 2 * self.layers * self.shared * self.depth * batch * length

    def operations(self, batch: int, tokens: int) -> int:
        """Returns how many operations the products of prompts have: a token attends to those before it and to itself,
        and the last one alone has logits.
        """
        attention = self.layers * self.heads * self.depth * tokens * (tokens + 1)
        head = self.width * self.vocabulary
        return 2 * batch * (tokens * (self.elements - head) + head + attention)

    def device_bytes(self, weights: str, batch: int, length: int) -> int:
        """Returns about how many bytes of a device's memory a process takes that measures it.

        The widest matrix is there in eager torch several times, as bytes, as numbers and as products with scales.
        """
        rows = 2 * self.width * self.vocabulary
        return self.elements * WEIGHTS[weights] // 8 + 5 * rows + 2 * self.cache_bytes(batch, length) + (3 << 30)


#: Those of Llama 3.2 1B and Llama 3.1 8B, and one for the engine that emulates a GPU.
SIZES = {
    "1b": Size(16, 2048, 32, 8, 8192, 128256),
    "8b": Size(32, 4096, 32, 8, 14336, 128256),
    "small": Size(2, 128, 4, 2, 256, 320),
}
