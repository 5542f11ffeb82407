"""The cold timer keeps the device busy for longer than the host takes to queue a run."""

from __future__ import annotations

import time

import pytest

from fusegraph.runtime import timing
from fusegraph.runtime.timing import FLUSH_US, MOST_FLUSHES, ColdTimer


class Device:
    """Counts queued work: flushes before each start event."""

    def __init__(self) -> None:
        self.flushes, self.before = 0, []

    def allocate(self, nbytes: int, device: int) -> Device:
        self.pointer = 1
        return self

    def memset(self, *_: object) -> None:
        self.flushes += 1


@pytest.fixture
def device(monkeypatch):
    made = Device()

    class Event:
        def __init__(self, device: int) -> None:
            self.records = 0

        def record(self, stream: int) -> None:
            if made.flushes:  # the start: the end is recorded with none in between
                made.before.append(made.flushes)
                made.flushes = 0

        def synchronize(self) -> None:
            pass

        def elapsed_ms(self, start: Event) -> float:
            return 0.25

    monkeypatch.setattr(timing.driver, "allocate", made.allocate)
    monkeypatch.setattr(timing.driver, "memset", made.memset)
    monkeypatch.setattr(timing.driver, "Event", Event)
    return made


def test_a_run_that_returns_at_once_is_timed_after_one_flush(device):
    assert ColdTimer().median(lambda: None, repeats=5) == 250.0
    assert sorted(device.before)[2] == 1  # now and then the machine is slower


def test_a_slow_host_is_covered(device):
    seconds = 1.5e-3
    timer = ColdTimer()
    assert timer.once(lambda: time.sleep(seconds)) == 250.0
    assert device.before[0] == 1
    assert device.before[-1] * FLUSH_US > seconds * 1e6
    tried = len(device.before)
    timer.once(lambda: None)
    assert len(device.before) == tried + 1  # once is enough from now on


def test_every_median_begins_anew(device):
    timer = ColdTimer()
    timer.once(lambda: time.sleep(2e-3))
    device.before.clear()
    timer.median(lambda: None, repeats=3, warmup=0)
    assert device.before[0] == 1


def test_a_run_that_waits_for_the_device_is_timed_all_the_same(device):
    assert ColdTimer().once(lambda: time.sleep(0.02)) == 250.0
    assert device.before[-1] == MOST_FLUSHES
