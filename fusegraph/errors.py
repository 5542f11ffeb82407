"""Every error a user can see.  Each names the node, tensor or file, what was seen, and what would be right."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


class FusegraphError(Exception):
    """Base of all errors raised by fusegraph.  Sizes that vary are written in the names of their Dims."""

    def __str__(self) -> str:
        text, sizes = super().__str__(), sys.modules.get("codegen.sizes")  # without which there are none
        return text if sizes is None else str(sizes.in_words(text))


class GraphError(FusegraphError):
    """A graph that is not well formed: no outputs, a tensor of another graph, two tensors of one name, a cycle."""


class ShapeError(GraphError):
    """Shapes that do not fit an op, or sizes whose product overflows."""


class DTypeError(GraphError):
    """A dtype unknown to fusegraph, or one that an op does not take."""


class LayoutError(GraphError):
    """An unknown layout name, or strides that do not fit the shape."""


class AttributeValueError(GraphError):
    """An attribute of an op (stride, padding, axis, ...) whose value is out of range."""


class GradientError(GraphError):
    """A gradient through an op that has none; the message names node and op, the reason, and what to do."""


class ArgumentError(FusegraphError):
    """An array given to an Executable that does not fit the graph: missing, extra, wrong shape, dtype or strides."""


class DeviceError(FusegraphError):
    """An array on the wrong device, no CUDA driver, no GPU, or an error the driver reported."""


class CompileError(FusegraphError):
    """NVRTC or the host compiler rejected a kernel; the message carries its log and where the source was kept."""

    __str__ = Exception.__str__  # identifiers are those of the source


class ToolchainError(FusegraphError):
    """NVRTC, its headers or a C++ compiler is missing; the message says what to install."""


class CacheError(FusegraphError):
    """The cache folder cannot be used; the message has the path and the reason."""


class WorkspaceError(FusegraphError):
    """A graph needs more workspace than the limit it was given."""


class InstallationError(FusegraphError, ImportError):
    """The package codegen that Python finds is not the one that came with fusegraph; raised by ``import fusegraph``."""


class FileError(FusegraphError):
    """A file given on the command line cannot be read, is not Python, raises, or holds no graph."""


class ResultsError(FusegraphError):
    """Rows of a benchmark that do not belong beside those of a file.

    They are of another machine, other libraries or another command; the message says what differs.
    """


class NotSupportedError(FusegraphError):
    """An engine that cannot run every graph (cuDNN) refuses this one, or a frontend has no op for some nodes; the
    message has the reason and the nodes.

    reason  the reason alone, in the engine's own words; "" where the message is no more than that.
    """

    def __init__(self, message: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ModelError(FusegraphError):
    """A model that an importer cannot read: no such file, cut short, malformed, or beyond a limit.  The message names
    the file and the node.
    """


class UnsupportedModelError(ModelError, NotSupportedError):
    """A model uses operators, types or values of attributes that its importer does not have; the message lists all.

    ``reasons`` has each of them once, such as "operator LSTM" or "type int16".
    """

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class KernelError(FusegraphError):
    """A kernel failed on the CPU engine: a deadlock, a barrier not reached by all threads, an access out of bounds."""


class OutOfMemoryError(FusegraphError, MemoryError):
    """More memory is needed than the machine has; the message says for what, how much, and how much there is."""


def listed(names: Iterable[str], most: int = 6) -> str:
    """Returns names as a message lists them: the first ones, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def one_line(error: Exception) -> str:
    """Returns what an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def shown(value: Any) -> str:
    """Returns a value as an error message shows it: its repr, if it has one, cut to a length that can be read."""
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= 250 else f"{text[:200]}... ({type(value).__name__})"
