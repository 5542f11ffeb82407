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
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
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
                with _own_warnings_as_notes(), _line.of_command():
                    _start()
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


def _start() -> None:
    """Imports most of what commands need, which takes long enough to be told."""
    doing("starting")
    import_module("fusegraph.engines")


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
    _line.hide()
    print(printable(text))


def note(text: str) -> None:
    """Prints a line about the run on stderr."""
    with contextlib.suppress(BrokenPipeError):
        print(f"fusegraph: {printable(text)}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    from fusegraph.report.artifacts import json_text

    _line.hide()
    sys.stdout.write(json_text(value))


def columns() -> int:
    """Returns the width of text on stdout: the terminal's, at most 120; 80 if it is not a terminal."""
    _line.hide()
    return min(shutil.get_terminal_size((80, 24)).columns, 120) if sys.stdout.isatty() else 80


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), details: Sequence[str] = ()
) -> None:
    """Prints a table on stdout; ``right`` lists the columns to align right, ``details`` has a text below each row."""
    from rich.cells import cell_len

    from fusegraph.report.explain import wrapped

    _line.hide()
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


# --- progress


class _Line:
    """What a command is doing: the last line of stderr if that is a terminal, gone before results are printed."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._total: int | None = None
        self._began = 0.0

    @contextlib.contextmanager
    def of_command(self) -> Iterator[None]:
        """Counts the time from here on, and leaves nothing behind at the end of the block."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self.hide()

    def show(self, text: str, total: int | None, done: int = 0) -> None:
        """Shows a text, and how many of ``total`` steps are done unless that is None."""
        if self._bars is not None and self._total != total:
            self.hide()
        if self._bars is None and not _is_terminal(sys.stderr):
            return
        if self._bars is None:
            self._start(printable(text), total)
        self._bars.update(self._bars.task_ids[0], description=printable(text), completed=done)

    def _start(self, described: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        counted = () if total is None else (BarColumn(), MofNCompleteColumn())
        self._total = total
        self._bars = Progress(
            *(SpinnerColumn(), text, *counted, TimeElapsedColumn()),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=_is_terminal(sys.stdout),
        )
        self._bars.add_task(described, total=total)
        self._bars.tasks[0].start_time = self._began
        self._bars.start()

    def hide(self) -> None:
        """Takes the line away, until there is something else to show."""
        if self._bars is not None:
            bars, self._bars = self._bars, None
            for stream in (sys.stdout, sys.stderr):
                if hasattr(stream, "rich_proxied_file"):
                    stream.flush()  # what has no line break yet
            bars.stop()


_line = _Line()


def doing(text: str) -> None:
    """Shows what is being done on stderr, if that is a terminal, until something else is or results are printed."""
    _line.show(text, None)


def progress(total: int) -> Callable[..., None]:
    """Returns a function that shows a progress bar of ``total`` steps on stderr, as `doing`.

    ``step(text, advance=0)`` tells it what is being done, and how many more steps are done.
    """
    done = 0

    def step(text: str, advance: int = 0) -> None:
        nonlocal done
        done += advance
        _line.show(text, total, done)

    return step


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
