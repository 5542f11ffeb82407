"""Stopping what takes too long: an alarm that breaks into the code of a library that was called."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class TooLong(BaseException):
    """Raised within a block whose time is up.  No Exception, so that code which catches all of those and goes on, as
    libraries that try alternatives do, is left too.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TooLong in the block when it has taken this long.

    Python code is left at once, a call of native code when it returns.  Only the main thread can be interrupted: on
    another there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_: int, __: Any) -> NoReturn:
        raise TooLong(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        # Once more every second: an exception raised within a destructor or a callback may get lost.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # reached even if the alarm came while the block was left
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
