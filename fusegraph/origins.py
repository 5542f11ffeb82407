"""Where nodes come from in users' programs: the module or node of a model, and the line of source."""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

#: A frame of a traceback: file, line, code.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n +([^\n]+))?')
#: Files whose lines are nobody's own: torch's modules.
_PACKAGES = re.compile(r"/(site|dist)-packages/torch/")
_OURS = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("fusegraph", "codegen"))
_COMMANDS = f"{_OURS[0]}cli/"


@dataclass(frozen=True)
class Origin:
    """Where a node comes from; "" for what is not known.  Reports read it: nothing is parsed before.

    path   of the module that it is in, as torch or ONNX writes it.
    name   its name in the model, where several nodes may come of it.
    what   what it is there: an operator of torch or of ONNX.
    trace  the traceback of the line of source that it is from.
    """

    path: str = ""
    name: str = ""
    what: str = ""
    trace: str = ""

    @property
    def scope(self) -> str:
        """The module's path with dots: ``layer1.0`` of ``L['self'].layer1[0]`` and of ``/layer1/layer1.0``."""
        steps = [step for step in self.path.split("/") if step]
        if len(steps) > 1:  # ONNX repeats the path in the names of containers
            kept = [a for a, b in pairwise(steps) if not b.startswith(f"{a}.")]
            return ".".join([*kept, steps[-1]])
        parts = re.findall(r"\w+", re.sub(r"^(L\['\w+'\]|L__self__)", "", self.path))
        return ".".join(part for part in parts if part not in ("_modules", "modules"))

    @property
    def op(self) -> str:
        """The operator's short name: ``relu`` of ``aten.relu_.default``."""
        return self.what.removeprefix("aten.").partition(".")[0].strip("_")

    @property
    def place(self) -> str:
        """The innermost line that is not torch's own: ``model.py:12: y = f(x)``."""
        frames = [frame for frame in _FRAME.findall(self.trace) if not _PACKAGES.search(frame[0])]
        if not frames:
            return ""
        file, line, code = frames[-1]
        return f"{Path(file).name}:{line}" + (f": {' '.join(code.split())}" if code else "")


_finder: ContextVar[Callable[[], Origin] | None] = ContextVar("finder", default=None)


@contextlib.contextmanager
def written_for(find: Callable[[], Origin]) -> Iterator[None]:
    """Notes ``find()`` as the origin of every node that is added to a graph meanwhile."""
    before = _finder.set(find)
    try:
        yield
    finally:
        _finder.reset(before)


def present() -> Origin | None:
    """Returns the origin of a node that is added now, None if nobody asked for it."""
    find = _finder.get()
    return None if find is None else find()


def calling_line() -> Origin:
    """Returns the line of source, outside of fusegraph, that adds a node now; none if a command does by itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_OURS, "<")):
        if frame.f_code.co_filename.startswith(_COMMANDS):
            return Origin()
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return Origin(trace=f'File "{file}", line {line}, in _\n    {linecache.getline(file, line).strip()}')
