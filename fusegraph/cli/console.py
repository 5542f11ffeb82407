"""What all commands share: printing, progress bars, and the handling of errors."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import signal
import sys
import threading
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, ParamSpec

from fusegraph.errors import FusegraphError

_PACKAGE = Path(__file__).parents[1]
NOT_OK, ERROR, DEFECT, INTERRUPTED, BROKEN_PIPE = 1, 2, 70, 130, 141
#: Error codes of writing to stdout.
_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)

P = ParamSpec("P")


def guarded(command: Callable[P, int]) -> Callable[P, None]:
    """Wraps a command so that it ends the process with the status that it returns, or that of the error it raises."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # the terminal's encoding may lack characters of a name
                stream.reconfigure(errors="backslashreplace")
        status = _guard(lambda: command(*args, **kwargs), as_json=bool(kwargs.get("as_json")))
        if status:
            raise SystemExit(status)

    return run


def _guard(body: Callable[[], int], *, as_json: bool) -> int:
    try:
        with _interrupts() as interrupts:
            try:
                with _own_warnings_as_notes():
                    status = body()
            except Exception as error:
                if interrupts:
                    raise KeyboardInterrupt from None
                if isinstance(error, OSError) and error.errno in _OUTPUT:
                    raise
                status = _report(error, as_json=as_json)
            sys.stdout.flush()
            return status
    except OSError as error:  # from stdout: errors of other files are FileErrors
        with contextlib.suppress(OSError, ValueError):  # flushing what is still buffered must not fail at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        note(f"error: stdout cannot be written: {error.strerror}")
        return ERROR
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Gives a list of the interrupts so far.

    Each still raises KeyboardInterrupt, but interrupted code may turn that into another error, as importing NumPy does.
    """
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, handle)
    try:
        yield seen
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _report(error: Exception, *, as_json: bool) -> int:
    """Prints what went wrong and returns the exit status."""
    kind, message, status = type(error).__name__, str(error), ERROR
    if isinstance(error, MemoryError) and not isinstance(error, FusegraphError):
        kind, message = "MemoryError", f"not enough memory: {error or 'an allocation failed'}"
    elif not isinstance(error, FusegraphError):
        traceback.print_exception(error)
        message, status = f"a defect of fusegraph, not of your graph: {kind}: {error}", DEFECT
    note(f"error: {message}")
    if as_json:
        print_json({"error": {"type": kind, "message": message}})
    return status


def check_autotune(engine: str, autotune: bool | None) -> None:
    """Raises FusegraphError if ``autotune`` is True and the engine does not run on a GPU."""
    if autotune and engine != "cuda":
        raise FusegraphError(f"--autotune times kernels on a GPU; engine {engine} runs on this machine's CPU")


@contextlib.contextmanager
def _own_warnings_as_notes() -> Iterator[None]:
    """Prints fusegraph's own warnings as one line without a source location; those of a user's file keep theirs."""

    def show(message: Warning | str, category: type[Warning], filename: str, *place: Any, **more: Any) -> None:
        if Path(filename).is_relative_to(_PACKAGE):
            note(f"warning: {message}")
        else:
            shown(message, category, filename, *place, **more)

    with warnings.catch_warnings():
        shown, warnings.showwarning = warnings.showwarning, show
        yield


# --- printing


def printable(text: str) -> str:
    """Replaces control characters, which a terminal would obey, with escapes; line breaks and tabs stay."""
    control = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return "".join(
        c.encode("unicode_escape", "surrogatepass").decode()
        if c not in "\n\t" and unicodedata.category(c) in control
        else c
        for c in text
    )


def say(text: str = "") -> None:
    """Prints a line of the result on stdout."""
    print(printable(text))


def note(text: str) -> None:
    """Prints a line about the run on stderr."""
    with contextlib.suppress(BrokenPipeError):
        print(f"fusegraph: {printable(text)}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    from fusegraph.report.artifacts import json_text

    sys.stdout.write(json_text(value))


def columns() -> int:
    """Returns the width of text on stdout: the terminal's, at most 120; 80 if it is not a terminal."""
    return min(shutil.get_terminal_size((80, 24)).columns, 120) if sys.stdout.isatty() else 80


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), details: Sequence[str] = ()
) -> None:
    """Prints a table on stdout; ``right`` lists the columns to align right, ``details`` has a text below each row."""
    from rich.cells import cell_len

    from fusegraph.report.explain import wrapped

    shown = [[printable(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*shown)]
    for number, row in enumerate(shown):
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths)):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if column in right else cell + space)
        print("  ".join(cells).rstrip())
        if number and details:
            say("\n".join(wrapped(details[number - 1], columns(), "    ", "      ")))


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[..., None]]:
    """Shows a progress bar of ``total`` steps on stderr, if that is a terminal.

    Gives a function ``step(text, advance=0)``: what is being done, and how many more steps are done.
    """
    if not _is_terminal(sys.stderr):
        yield lambda text, advance=0: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text_column = TextColumn("{task.description}", markup=False)
    parts = (SpinnerColumn(), text_column, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)

        def step(text: str, advance: int = 0) -> None:
            bars.update(task, description=printable(text), advance=advance)

        yield step


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
