"""Functions that write several nodes (`Graph.einsum`): what was called, and what it means in NumPy.

A graph keeps each such call beside the nodes that it wrote, so that the nodes can be checked against a formula that
they do not share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from fusegraph.operations import Operations
from fusegraph.ops.base import Array
from fusegraph.ops.reverse import Rule
from fusegraph.tensor import Node, Tensor

#: (type of the result, the function's arguments with arrays for tensors) -> the result, or a list of several.
#: Arrays of floats are float64, unrounded; those of integers and bool have their own type.
Meaning = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call:
    """A call that made a tensor: the function, its arguments, and which of several results it is.

    inner   the tensors made by the nodes that the function wrote.
    weighs  whether results are sums of weighted elements, in any order: NaN or infinity of an element whose weight is 0
            may be in a result or not.
    gradient  a rule as those of ops (`ops.reverse`), of a function that has a better one than its nodes.
    """

    name: str
    inner: tuple[Tensor, ...]
    weighs: bool
    meaning: Meaning
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    number: int | None = None
    gradient: Rule | None = None

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, each once."""
        return tuple(dict.fromkeys(t for x in (*self.arguments, *self.keywords.values()) for t in _tensors(x)))

    def results(self, node: Node, values: Mapping[Tensor, Array]) -> tuple[Array, ...]:
        """Returns the result as a reference array, from those of the operands.

        ``node`` is the last one that the call wrote: it makes the result.
        """
        result = node.output.type

        def known(x: Any) -> Any:
            if isinstance(x, Tensor):
                return values[x]
            return type(x)(map(known, x)) if isinstance(x, (list, tuple)) else x

        with np.errstate(all="ignore"):
            found = self.meaning(result, *map(known, self.arguments), **{k: known(v) for k, v in self.keywords.items()})
            value = np.asarray(found if self.number is None else found[self.number])
            return (value.astype(np.float64 if result.dtype.is_float else result.dtype.numpy),)


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for one in x:
            yield from _tensors(one)


def means(meaning: Meaning, *, weighs: bool = False, gradient: Rule | None = None) -> Callable[[Function], Function]:
    """Decorates a method so that its graph keeps the calls, with their NumPy meaning; the rest is `Call`'s."""

    def recorded(function: Function) -> Function:
        @wraps(function)
        def method(self: Operations, *arguments: Any, **keywords: Any) -> Any:
            if self._written is not None:  # called by another such method
                return function(self, *arguments, **keywords)
            written: list[Node] = []
            self._written = written
            try:
                made = function(self, *arguments, **keywords)
            finally:
                self._written = None
            if written:
                keywords.pop("name", None)
                inner = tuple(t for node in written for t in node.outputs)
                results = made if isinstance(made, list) else [made]
                for number, tensor in enumerate(results):
                    if tensor not in self.calls and tensor not in arguments:
                        part = number if isinstance(made, list) else None
                        self.calls[tensor] = Call(
                            function.__name__, inner, weighs, meaning, arguments, keywords, part, gradient
                        )
            return made

        return method  # type: ignore[return-value]

    return recorded
