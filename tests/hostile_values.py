"""Invalid values for arguments, and a judge of calls with them: a call must accept one or raise a fusegraph error."""

from __future__ import annotations

import itertools
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

import fusegraph as fg
from fusegraph.errors import FusegraphError
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs

SECONDS = 20.0


class Raises:
    """Raises at every operation."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("asked")

    __index__ = __len__ = __iter__ = __float__ = __bool__ = __array__ = __getitem__ = _refuse
    __eq__ = __ne__ = __hash__ = __repr__ = __getattr__ = _refuse


class Lies:
    """Gives invalid results for every operation."""

    def __index__(self) -> Any:
        return "x"

    def __len__(self) -> int:
        return -1

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


OTHER = fg.Graph("other").tensor("t", (2, 3))

#: Makers of values: some can be used once.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-1": lambda: -1,
    "0": lambda: 0,
    "2**70": lambda: 2**70,
    "text": lambda: "x",
    "bytes": lambda: b"x",
    "[]": list,
    "[[1]]": lambda: [[1]],
    "truths": lambda: np.array([True, False]),
    "raises": Raises,
    "lies": Lies,
    "of another graph": lambda: OTHER,
    "deep": lambda: _nested(2000),
    "endless": itertools.count,
}
#: For a longer look.
MORE: dict[str, Callable[[], Any]] = {
    "1": lambda: 1,
    "2": lambda: 2,
    "-2**70": lambda: -(2**70),
    "10**6000": lambda: 10**6000,
    "2**63-1": lambda: 2**63 - 1,
    "1.5": lambda: 1.5,
    "1j": lambda: 1j,
    "True": lambda: True,
    "no text": lambda: "",
    "add": lambda: "add",
    "float32": lambda: "float32",
    "(1,)": lambda: (1,),
    "(1, 2)": lambda: (1, 2),
    "zeros": lambda: (0, 0, 0, 0),
    "large": lambda: [2**62] * 3,
    "deeper": lambda: [[[2]]],
    "mapping": lambda: {1: 2},
    "set": lambda: {1, 2},
    "matrix": lambda: np.zeros((2, 2)),
    "0-d": lambda: np.array(1),
    "0-d float": lambda: np.array(1.5),
    "array of text": lambda: np.array("x"),
    "array of objects": lambda: np.array([None]),
    "float16": lambda: np.float16(2),
    "int8": lambda: np.int8(-3),
    "date": lambda: np.datetime64("2020"),
    "object": object,
    "type": lambda: np.int8,
    "function": lambda: len,
    "slice": lambda: slice(None),
    "ellipsis": lambda: ...,
    "long range": lambda: range(10**12),
    "generator": lambda: (i for i in range(3)),
}


def fault(call: Callable[[Any], object], make: Callable[[], Any]) -> str | None:
    """Returns what is wrong with how a call handles a value: an error that is not fusegraph's, or no answer in time.

    None if nothing is wrong.
    """
    try:
        with _deadline():
            call(make())
    except FusegraphError as error:
        return None if str(error) else f"a {type(error).__name__} without a text"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {last.filename}:{last.lineno}: {str(error)[:100]}"
    return None


@contextmanager
def _deadline() -> Iterator[None]:
    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def use(graph: fg.Graph, result: Any, *, planned: bool = False) -> None:
    """Runs an accepted graph: every tensor must have its inferred shape, and every node a kernel."""
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, fg.Tensor) and tensor.graph is graph and tensor not in graph.outputs:
            graph.output(tensor)
    if not graph.outputs or sum(t.size for t in graph.tensors.values()) > 200_000:
        return
    found = graph.compile("reference")(**random_inputs(graph))
    shapes = [x.shape for x in (found if isinstance(found, tuple) else (found,))]
    assert shapes == [t.shape for t in graph.outputs]
    if planned:
        plan(graph)
