"""The suite of schedules: kernels of models and layers, going on where a run stopped, regret; without a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from codegen import schedules
from codegen.target import target
from fusegraph.bench.schedules import run
from fusegraph.bench.schedules.kernels import Source, graphs, kernel_data, kernel_from_data, kernels_of, merged
from fusegraph.bench.schedules.regret import HEADS, regrets, table, text
from fusegraph.bench.schedules.run import Measurements, read
from fusegraph.cli import main
from fusegraph.errors import DeviceError
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.estimates import plan_us, predicted_us

H200 = target("h200")
SOURCES = [Source(seed=3, number=n) for n in range(4)]


@pytest.fixture(scope="module")
def kernels() -> list[Any]:
    return merged([kernels_of(source, H200, "cpu") for source in SOURCES])


@pytest.mark.slow
def test_kernels_of_cases_survive_json(kernels: list[Any]) -> None:
    assert len({k.key for k in kernels}) == len(kernels) >= len(SOURCES)
    for kernel in kernels:
        again = kernel_from_data(json.loads(json.dumps(kernel_data(kernel))))
        assert again.key == kernel.key
        assert (again.arguments, again.uses, again.nbytes) == (kernel.arguments, kernel.uses, kernel.nbytes)
        assert not any(a.dtype.name.startswith("int") for a in kernel.arguments[:-1])  # they may be indices


def test_alike_kernels_are_one_with_the_uses_of_all() -> None:
    first, second = kernels_of(SOURCES[0], H200, "cpu"), kernels_of(SOURCES[0], H200, "cpu")
    for kernel in second:
        kernel.uses.clear()
        kernel.uses["another"] = 2
    both = merged([first, second])
    assert len(both) == len(first)
    assert all(set(k.uses) == {SOURCES[0].name, "another"} for k in both)


def test_estimates_are_never_below_memory(kernels: list[Any]) -> None:
    for kernel in kernels:
        least = H200.launch_us + kernel.nbytes / H200.memory_rate
        assert all(predicted_us(kernel.spec, s, kernel.nbytes, H200) > least for s in schedules(kernel.spec, H200))
    (graph,) = graphs(SOURCES[0], "cpu")
    made = plan(graph, Options(target=H200))
    assert plan_us(made, H200) > H200.launch_us * len(made.kernels)


class Clock:
    """A stopwatch: the n-th schedule of a kernel that it is given takes so many microseconds, or fails."""

    def __init__(self, times: Sequence[float | None]) -> None:
        self.times = times
        self.asked = 0

    def __call__(self, arguments: Sequence[Any]) -> Clock:
        self.asked += 1
        self.left = list(self.times)
        return self

    def once(self, *compiled: Any) -> Callable[[], float]:
        us = self.left.pop(0) if self.left else 90.0
        if us is None:
            raise DeviceError("it has too many threads")
        return lambda: us


class _Clock(Clock):
    def __call__(self, *given: Any) -> Any:
        return super().__call__(given[0]) if len(given) == 1 else self.once(*given)


class Here:
    """A pool of this process alone."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def imap(self, function: Callable[[Any], Any], jobs: Sequence[Any]) -> Any:
        class Results:
            def __init__(self) -> None:
                self.every = map(function, jobs)

            def __iter__(self) -> Any:
                return self.every

            def next(self, timeout: float) -> Any:
                return next(self.every)

        return Results()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_processes", lambda count: Here())
    monkeypatch.setattr(run, "_compiled", lambda job: (job.kernel, job.schedule))


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path: Path, here: None) -> None:
    file, failed = tmp_path / "schedules.json", []
    made = Measurements(H200, 3, file)
    sources = [*SOURCES, Source("no such model", "bf16")]
    made.plan(sources, "cpu", 2, lambda name, why: failed.append(name))
    assert failed == ["no such model bf16"]
    made.save()
    made = Measurements(H200, 3, file)
    assert made.sources == [source.name for source in SOURCES]
    assert not made.rows
    clock, every = _Clock([30.0, None, 20.0]), dict(made.kernels)
    made.kernels = dict(list(every.items())[:2])
    assert made.measure(2, time.perf_counter() + 60, clock) >= 2
    made.kernels = every
    made.save()
    again = Measurements(H200, 3, file)
    assert len(again.rows) == clock.asked == 2
    assert list(again.kernels) == list(every)
    again.measure(2, time.perf_counter() + 60, clock)
    assert clock.asked == len(every) == len(again.rows)
    assert not Measurements(H200, 4, file).rows  # of other options
    assert not Measurements(target("a100"), 3, file).rows


@pytest.mark.slow
def test_regret(tmp_path: Path, here: None) -> None:
    file = tmp_path / "schedules.json"
    made = Measurements(H200, 3, file)
    made.plan(SOURCES, "cpu", 2, lambda name, why: None)
    made.measure(2, time.perf_counter() + 60, _Clock([30.0, None, 20.0]))
    on, rows = read(file)
    assert on is H200
    every = regrets(rows)
    assert {r.ratio for r in every} <= {1.0, 1.5}  # kernels of one or two schedules have no third one
    assert every[0].ratio == 1.5
    assert every[0].lost_us == 10.0 * sum(every[0].kernel.uses.values())
    cells = table(every, H200)
    assert all(len(line) == len(HEADS) for line in cells)
    assert cells[0][:2] == ["all", str(len(every))]
    assert sum(int(line[1]) for line in cells if line[0] in {r.kernel.family for r in every}) == len(every)
    said = text(every, H200, count=2)
    assert " 1.50  " in said
    assert "chosen     30.0 us" in said
    assert "best       20.0 us" in said
    failed = next(s for _, schedules in rows for s in schedules if s["us"] is None)
    assert failed["why"] == "DeviceError: it has too many threads"


@pytest.mark.slow
def test_command(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    command = ["bench", "--suite", "schedules", "--only", "no such model", "--count", "2", "--seed", "3"]
    monkeypatch.setattr("fusegraph.runtime.driver.unavailable_reason", lambda: "no driver; use engine='cpu'")
    assert main([*command, "--list", "--json", str(tmp_path / "s.json")]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == len(json.loads((tmp_path / "s.json").read_text())["rows"])
    assert main(command) == 2
    assert "there is none: no driver" in capsys.readouterr().err
    assert main([*command, "--list", "--dtypes", "int8"]) == 2
    assert "'int8' is none of bf16" in capsys.readouterr().err
    assert main([*command, "--only", "("]) == 2
    assert "no regular expression" in capsys.readouterr().err
