"""Jobs in processes of their own: one that fails, crashes or takes too long is told, and the others go on."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

_Job = TypeVar("_Job")


@dataclass(frozen=True)
class Failure:
    """Why a job has no result."""

    reason: str


def processors() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def told(error: BaseException) -> str:
    """Returns an error's class and text on one line, shortened."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def each(
    function: Callable[[_Job], Any], jobs: Sequence[_Job], processes: int, limit_s: float, end: float = float("inf")
) -> Iterator[tuple[_Job, Any]]:
    """Yields jobs with their results, or Failures, as they are done; so many processes work at a time.

    A process has one job, and is killed after ``limit_s`` seconds.  After the time ``end`` of `time.perf_counter`
    none is begun, and those at work are killed and not told of.  ``function`` is one of a module.
    """
    context = multiprocessing.get_context("spawn")
    left, working = list(reversed(jobs)), list[tuple[Any, Connection, _Job, float]]()
    try:
        while left or working:
            while left and len(working) < processes and time.perf_counter() < end:
                job = left.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(function, job, theirs), daemon=True)
                process.start()
                theirs.close()
                working.append((process, ours, job, time.perf_counter() + limit_s))
            if not working:
                return
            until = min(end, *(limit for *_, limit in working))
            ready = wait([pipe for _, pipe, _, _ in working], timeout=max(0.0, until - time.perf_counter()))
            now = time.perf_counter()
            if now >= end:
                return
            for entry in [entry for entry in working if entry[1] in ready or now >= entry[3]]:
                working.remove(entry)
                yield entry[2], _result(entry[0], entry[1], limit_s, answered=entry[1] in ready)
    finally:
        for process, pipe, *_ in working:
            process.kill()
            pipe.close()


class Servant:
    """A process with an object of its own, whose methods it calls for this one, one at a time.

    ``make`` makes the object; it can be pickled.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._limit_s = self._until = 0.0

    def begin(self, method: str, *arguments: Any, limit_s: float) -> None:
        """Begins a call, which has so many seconds; `result` ends it."""
        self._limit_s, self._until = limit_s, time.perf_counter() + limit_s
        with suppress(OSError):  # a process that is gone has no result
            self._pipe.send((method, arguments))

    def result(self) -> Any:
        """Returns what the call returned, or a Failure: it raised, took too long, or its process ended."""
        answered = self._pipe.poll(max(0.0, self._until - time.perf_counter()))
        try:
            return self._pipe.recv() if answered else Failure(f"not done within {self._limit_s:g} s")
        except (EOFError, OSError):
            self._process.join(10)
            return Failure(f"its process ended with status {self._process.exitcode}")

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    @staticmethod
    def ready(servants: Sequence[Servant]) -> list[bool]:
        """Waits until a call of one of them has a result or took too long; tells which have."""
        first = min(servant._until for servant in servants)
        pipes = wait([servant._pipe for servant in servants], timeout=max(0.0, first - time.perf_counter()))
        now = time.perf_counter()
        return [servant._pipe in pipes or now >= servant._until for servant in servants]


@contextmanager
def alone(caches: str, *, compiles: bool = False) -> Iterator[None]:
    """Waits until no other process measures whose caches lie beside these; a lock that ends with the process.

    Any number of processes that only compile have it at a time.
    """
    folder = Path(caches).parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if compiles else fcntl.LOCK_EX)
        yield


def _work(function: Callable[[Any], Any], job: Any, pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe.send(_tried(function, job))


def _serve(make: Callable[[], Any], pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    made = _tried(make)
    while True:
        method, arguments = pipe.recv()
        pipe.send(made if isinstance(made, Failure) else _tried(getattr(made, method), *arguments))


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        return Failure(told(error))


def _end_with_parent() -> None:
    """Ends this process when the one that began it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _result(process: Any, pipe: Connection, limit_s: float, *, answered: bool) -> Any:
    """Returns what a process has sent, or why it has sent nothing."""
    try:
        if answered:
            return pipe.recv()
        return Failure(f"not done within {limit_s:g} s")
    except EOFError:
        process.join(10)
        return Failure(f"its process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()
        pipe.close()
