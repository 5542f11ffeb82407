"""The ways to combine elements: reductions, scans, windows and scatters all draw from this table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Combiner:
    """An associative and commutative way to combine two values into one.

    ufunc     NumPy's function of two values.
    neutral   the neutral value, which changes nothing when combined; infinity stands for the type's largest number.
    word      what a combined value is called beside the elements that it is made of.
    function  the C++ function of two values of one type; "" if kernels only combine in memory.
    functor   the type of ``codegen/device/reduce.cuh`` whose ``of`` is that function.
    sign      the C operator for floats.  Integers then are combined in 32 or 64 bits, and wrap around.
    atomic    the function of ``codegen/device/scatter.cuh`` that combines integers in memory in any order; "": none.
    floats    whether it combines floats only.
    running   the class template of ``codegen/device/reduce.cuh`` in which a thread combines many values faster than two
              by two; "": their own type.
    selects   whether the result is one of the values: nothing is rounded, and of no values there is none.
    """

    name: str
    ufunc: np.ufunc
    neutral: float
    word: str
    function: str = ""
    functor: str = ""
    sign: str = ""
    atomic: str = ""
    running: str = ""
    selects: bool = False
    floats: bool = False

    @property
    def widens(self) -> bool:
        """Whether integers are combined in 32 or 64 bits, wrapping around."""
        return bool(self.sign)

    def start(self, dtype: np.dtype[np.generic] | str) -> float:
        """Returns the neutral value in a NumPy dtype or C type."""
        kind = np.dtype(dtype)
        if kind.kind == "f":
            return self.neutral
        if np.isfinite(self.neutral):
            return int(self.neutral)
        if kind.kind == "b":
            return self.neutral > 0
        return int(np.iinfo(kind).max if self.neutral > 0 else np.iinfo(kind).min)


ADD = Combiner("add", np.add, 0.0, "sum", "math::wrapping_add", "reduce::Add", "+", "scatter::add")
MUL = Combiner("mul", np.multiply, 1.0, "product", "math::wrapping_mul", "reduce::Mul", "*")
MAX = Combiner("max", np.maximum, -np.inf, "max", "math::maximum", "reduce::Max", selects=True)
MIN = Combiner("min", np.minimum, np.inf, "min", "math::minimum", "reduce::Min", selects=True)
LOGADDEXP = Combiner(
    "logaddexp",
    np.logaddexp,
    -np.inf,
    "log",
    "reduce::Logaddexp::of",
    "reduce::Logaddexp",
    running="reduce::Exponentials",
    floats=True,
)
#: The largest of integers that are taken as unsigned ones.
MOST = Combiner("most", np.maximum, 0.0, "most", atomic="scatter::most", selects=True)

COMBINERS = {combiner.name: combiner for combiner in (ADD, MUL, MAX, MIN, LOGADDEXP, MOST)}
