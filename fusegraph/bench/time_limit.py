"""Stops work that takes too long, by an alarm that interrupts even the code of a library."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class TooLong(BaseException):
    """Raised within a block whose time is up.

    It is not an Exception, so that libraries which catch all of these to try alternatives do not catch it.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TooLong within the block when it has taken this long.

    Python code is interrupted at once, native code when it returns.  Only the main thread can be interrupted: in others
    there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_: int, __: Any) -> NoReturn:
        raise TooLong(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        # Repeated every second: an exception raised within a destructor or a callback may get lost.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # reached even if the alarm goes off while the block is being left
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
