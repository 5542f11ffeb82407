"""What an entry of the op table says about an op, and the table itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from codegen.combiners import Combiner
from codegen.windows import Window
from fusegraph.dtypes import DType, bool_, promote
from fusegraph.errors import DTypeError, GraphError


class Kind(Enum):
    """What fusion needs to know about an op: legality follows from the kind, never from the op's name."""

    __hash__ = object.__hash__  # that of Enum is a function of Python's

    POINTWISE = "pointwise"
    MOVEMENT = "movement"
    REDUCTION = "reduction"
    SCAN = "scan"
    SORT = "sort"
    SCATTER = "scatter"
    ASSIGN = "assign"
    POOLING = "pooling"
    CONTRACTION = "contraction"
    COMPOSITE = "composite"
    TRANSFORM = "transform"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention_backward"


class Role(Enum):
    """What an op does among those of its kind: passes, lowerings and reports ask for it when they mean, say, a cast.

    Ops that do the same have one role (add and bias, a convolution and the parts of one).  Movement, contractions,
    transforms and reductions all have one; of the other kinds, only those ops have one that something asks for.
    """

    CAST = "converts the elements to a dtype, or leaves them as they are"
    NARROW = "is its operand, rounded where it is stored"
    INDEX = "numbers the elements along an axis"
    SIZE = "is a size that varies"
    SELECT = "chooses between two elements by a condition"
    BITS = "combines bits: the result says nothing of those for the next numbers"
    BITCAST = "reads the bits as another dtype"
    SUM, DIFFERENCE, PRODUCT, QUOTIENT = "a + b", "a - b", "a * b", "a / b"
    MAX, MIN = "the larger of a and b", "the smaller of a and b"
    AND, OR, NOT = "a and b", "a or b", "not a"
    EQ, NE, GT, GE, LT, LE = "a == b", "a != b", "a > b", "a >= b", "a < b", "a <= b"
    TRANSPOSE, RESHAPE, BROADCAST, GATHER = "transpose", "reshape", "broadcast", "gather"
    SLICE, PAD, CONCATENATE = "slice", "pad", "concatenate"
    PUT = "puts updates at the positions of an index, or combines them with what is there"
    LOG_SOFTMAX = "the logarithm of a softmax"
    SPARSE = "keeps two of four neighbours"
    # Reductions and sorting: of whole axes or of parts; the two steps in which long rows are sorted.
    REDUCE, PARTIAL, RUNS, MERGE = "reduces axes", "reduces parts of axes", "sorts runs", "merges sorted runs"
    # Contractions (a convolution, and its gradients by its input and by its filter), and transforms around one.
    MATMUL, FPROP, DGRAD, WGRAD = "matmul", "conv_fprop", "conv_dgrad", "conv_wgrad"
    SPARSE_MATMUL = "a matmul with a matrix of which two of four neighbours are stored"
    WINOGRAD_FILTER, WINOGRAD_INPUT, WINOGRAD_OUTPUT = "filter", "input", "output"


class Cost(Enum):
    """What it costs to compute an element of a pointwise op again instead of reading it; the cheapest first."""

    ROUNDING = "comes with the conversion to a type of 16 bits"
    PAIR = "one instruction, which computes two elements of 16 bits"
    SIMPLE = "an instruction or a few"
    FUNCTION = "many instructions, or not known to be few"


@dataclass(frozen=True)
class TensorType:
    """Shape (logical order, e.g. N, C, H, W) and dtype of a tensor, without its layout."""

    shape: tuple[int, ...]
    dtype: DType


#: Of operands, in order; of attributes, by name; values of any NumPy dtype.
Types: TypeAlias = tuple[TensorType, ...]
Attributes: TypeAlias = Mapping[str, Any]
Array: TypeAlias = np.ndarray[Any, Any]


#: Distinguishes "has no default" from a default of None in `Op.attributes`.
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()


@dataclass(frozen=True)
class Op:
    """One op: everything any part of fusegraph knows about it.

    name        cuDNN's graph-API name where cuDNN has the op.
    kind        decides how it can be fused.
    role        what the op does among those of its kind, where anything asks (see `Role`).
    cost        pointwise ops: what an element takes (see `Cost`).
    operands    names of the tensor operands, in order.
    variadic    whether the op takes any number of tensors, one or more; ``operands`` then names one of them.
    masks       operands that are conditions: converted to bool, not promoted with the others.
    integers    operands that are integers by themselves (seeds, positions): neither promoted nor converted.
    shapes      operands of which the result depends on the shape and the element's position in it, not on the values.
    finite      pointwise ops: the result is finite if the operands are, and are no larger than attention scores.
    random      pointwise ops: the result is of random numbers.
    attributes  attribute name -> default (REQUIRED when there is none).
    words       attribute name -> the values that it may have, where these are words; None may be one of them.
    infer       (operand types, attributes) -> result type, or one for each of several results; raises ShapeError,
                DTypeError or AttributeValueError whose text needs no node name (the builder adds it).
    normalize   optional: (operand types, attributes) -> attributes in canonical form (an axis made non-negative, a
                padding given as one number spread over the dimensions); runs before infer, raises AttributeValueError.
    reference   NumPy meaning: called with an array for each operand and the attributes as keywords.  Float operands
                arrive as float64 whatever their dtype; integers and booleans arrive in their own NumPy dtype.  All
                operands have been converted to their promoted dtype.  Follows IEEE and NumPy for NaN and infinity.
                Gives a tuple where there are several results.
    results     names of the results of an op that has several (composites only), in order: the tensors are named after
                the node and these.
    optional    how many of the last operands may be left out.
    neutral     what stands for an operand that is left out in front of one that is not.
    absent      operands that a related op has and this one lacks -> why, for the error if one is given.
    cuda        pointwise ops: a CUDA C expression for each class of operand dtype the op accepts ("float", "int",
                "bool"), with {operand} and {attribute} placeholders; operands and attributes are identifiers or
                literals of the promoted compute type.  A function of the attributes where the expression depends on
                them; `expression` hides the difference.  A class that is absent is a dtype the op does not take.
    ulps        bound on the error of the CUDA expression in units of the compute type's last place, for results that
                are finite and not subnormal.  Where terms cancel (relu with a clip, gradients that cross zero), in
                units of the largest term.
    scale       the magnitude of that term, called like ``reference``; None where it is the result.
    reference_ulps  bound on the error of the NumPy reference itself, in units of float64's last place.
    turns       pointwise ops with extremes or jumps anywhere, so that values between two operands may lie beyond those
                at the two: (operands) -> a number that changes by 1 from one extreme or jump to the next.  None where
                extremes are only at the ends of an operand's range, at 0 or at another operand.
    windows     window ops: (operand types, attributes) -> (the window along each axis that has one, the shape of the
                result).
    fold        window ops: what is made of a window: its "max", the "index" of that, the "mean", the sum of what was
                "chosen" (the loss of each window whose index is this element), of the "shares" of means, or of
                "columns".
    combiner    scans and window ops: how elements are combined.
    products    contractions: (operand types, attributes) -> the most products that a result sums up.
    multiplications  what is made of products: (operand types, attributes) -> how many there are, where this is not as
                many for each result as ``products`` says.
    composite   attributes -> whether the op is made of others; None where the kind says it.
    expand      composites: (write, operands, attributes as keywords) -> the result, or a tuple of several, of nodes
                that ``write(op, part, operands, attributes as keywords)`` adds and names (see `passes.decompose`).
    keeps_layout  contractions and composites: whether the result lies in memory as the first operand does (NHWC in,
                NHWC out).
    weighs      composites: whether results are sums of weighted elements: NaN or infinity of an element whose weight is
                0 may be in a result or not.
    gradient    (`ops.reverse.Reverse`, operands, attributes as keywords) -> the gradient by each operand; or the reason
                why there is none.  None: results are no floats, or the composite's nodes have gradients.
    as_stored   composites: whether ``expand`` gets operands in their own dtype, else in the one they are computed in.
    cudnn       name of the mode or method in cuDNN's graph API, None where it has none.
    """

    name: str
    kind: Kind
    operands: tuple[str, ...]
    infer: Callable[[Types, Attributes], TensorType | Types]
    reference: Callable[..., Any]
    role: Role | None = None
    cost: Cost | None = None
    attributes: Attributes = field(default_factory=dict)
    words: Mapping[str, Collection[str | None]] = field(default_factory=dict)
    normalize: Callable[[Types, Attributes], dict[str, Any]] | None = None
    cuda: Mapping[str, str | Callable[[Attributes], str]] = field(default_factory=dict)
    ulps: float = 1.0
    scale: Callable[..., Array] | None = None
    reference_ulps: float = 4.0
    turns: Callable[..., Any] | None = None
    windows: Callable[[Types, Attributes], tuple[dict[int, Window], tuple[int, ...]]] | None = None
    fold: str = ""
    combiner: Combiner | None = None
    products: Callable[[Types, Attributes], int] | None = None
    multiplications: Callable[[Types, Attributes], int] | None = None
    composite: Callable[[Attributes], bool] | None = None
    expand: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | str | None = None
    cudnn: str | None = None
    results: tuple[str, ...] = ("",)
    optional: int = 0
    neutral: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    weighs: bool = False
    as_stored: bool = False
    keeps_layout: bool = False
    variadic: bool = False
    masks: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    finite: bool = False
    random: bool = False
    doc: str = ""

    def __post_init__(self) -> None:
        EVERY.setdefault(self.name, self)

    def names(self, count: int) -> tuple[str, ...]:
        """Returns the names of ``count`` operands."""
        return self.operands * count if self.variadic else self.operands[:count]

    def operand_dtypes(self, types: Types) -> tuple[DType, ...]:
        """Returns the dtype that each operand is converted to before the op.

        That is bool for masks, the operand's own for integers, and the promoted dtype for the others.
        """
        common = self.promoted(types)
        return tuple(
            bool_ if key in self.masks else t.dtype if key in self.integers else common
            for key, t in zip(self.names(len(types)), types)
        )

    def promoted(self, types: Types) -> DType:
        """Returns the promoted dtype of all operands but masks and integers: it decides on expression and result."""
        rest = [t.dtype for key, t in zip(self.names(len(types)), types) if key not in (*self.masks, *self.integers)]
        return reduce(promote, rest) if rest else bool_

    def expression(self, kind: str, attributes: Attributes) -> str:
        """Returns the CUDA C expression for operands of a class ("float", "int", "bool") and normalized attributes."""
        template = self.cuda[kind]
        return template if isinstance(template, str) else template(attributes)

    def is_composite(self, attributes: Attributes) -> bool:
        """Returns true if the op, with normalized attributes, is written out as others before fusion."""
        return self.kind is Kind.COMPOSITE or (self.composite is not None and self.composite(attributes))

    @property
    def commutes(self) -> bool:
        """Whether its two operands may be exchanged."""
        return self.role in (Role.SUM, Role.PRODUCT, Role.MAX, Role.MIN, Role.AND, Role.OR)

    @property
    def cheap(self) -> bool:
        """Whether it is pointwise, and better computed again than read."""
        return self.cost is not None and self.cost is not Cost.FUNCTION

    @property
    def reads_values(self) -> bool:
        """Whether the result depends on an operand's values; that of gen_index depends on a shape alone."""
        return len(self.shapes) < len(self.operands)

    def __hash__(self) -> int:
        return hash(self.name)


TABLE: dict[str, Op] = {}
#: Every op by name: those of the table, and those that only passes write.
EVERY: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Adds an op to the table.  Raises GraphError if the name is taken."""
    if op.name in TABLE:
        raise GraphError(f"op {op.name!r} is defined twice")
    TABLE[op.name] = op
    return op


def check_stored_only(op: Op, dtypes: Iterable[DType]) -> None:
    """Raises DTypeError if an op would compute in a type for storage: these are only cast, moved, selected."""
    packed = next((d for d in dtypes if d.is_packed), None)
    if packed is not None and op.kind is not Kind.MOVEMENT and op.role not in (Role.CAST, Role.SELECT, Role.SPARSE):
        wide = "int8 or a float" if packed.is_int else f"{packed.carrier if packed.min > 0 else 'float16'} or float32"
        raise DTypeError(f"{op.name} does not compute in {packed}, which is for storage; cast to {wide}")
