"""The autotuner: what is timed, what wins, what is remembered.  The stopwatch is a table of times; there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

import fusegraph as fg
from codegen import (
    PORTABLE,
    KernelSpec,
    best_schedule,
    render,
    schedule_data,
    schedule_from_data,
    schedule_text,
    schedules,
    target,
)
from codegen.spec import KernelSource
from fusegraph.engines import autotune
from fusegraph.engines.autotune import Tuner, choosers, fingerprint, wanted, winner
from fusegraph.errors import CompileError, DeviceError, FusegraphError
from fusegraph.graph import Tensor
from fusegraph.passes.partition import Group
from fusegraph.plan import plan
from fusegraph.report.explain import describe, explain_text
from fusegraph.runtime import driver
from fusegraph.runtime.cache import DiskCache
from fusegraph.runtime.nvrtc import CompiledKernel, supported_archs

ARCH = "sm_90a"


def pointwise(name: str = "fma", size: int = 4096, dtype: str = "float32") -> fg.Graph:
    graph = fg.Graph(name, io_dtype=dtype)
    a, b = graph.tensor("a", (64, size)), graph.tensor("b", (64, size))
    graph.output(graph.relu(a * b + a), name="y")
    return graph


def depthwise(layout: str = "NHWC") -> fg.Graph:
    graph = fg.Graph("depthwise", io_dtype="bfloat16")
    x = graph.tensor("x", (2, 64, 28, 28), layout=layout)
    graph.output(graph.conv_fprop(x, graph.tensor("w", (64, 1, 3, 3)), padding=1, groups=64), name="y")
    return graph


def product() -> fg.Graph:
    graph = fg.Graph("product")
    graph.output(graph.tensor("a", (200, 64)) @ graph.tensor("b", (64, 300)), name="y")
    return graph


def only(graph: fg.Graph) -> tuple[KernelSpec, Group]:
    (group,) = plan(graph).partition.groups
    return group.lowered.spec, group


GRAPHS = {
    "pointwise": pointwise,
    "depthwise NHWC": depthwise,
    "depthwise NCHW": lambda: depthwise("NCHW"),
    "matmul": product,
}


class Clock:
    """A stopwatch that reads microseconds from a table: by candidate number, or a failure; counts what it is asked."""

    def __init__(self, spec: KernelSpec, times: Iterable[float | None]) -> None:
        candidates = schedules(spec, target(ARCH))
        self.times = {render(spec, s).code: us for s, us in zip(candidates, times)}
        self.given: list[Sequence[Tensor]] = []
        self.timed: list[str] = []

    def of(self, tensors: Sequence[Tensor]) -> Clock:
        self.given.append(tensors)
        return self

    def __call__(self, source: KernelSource, compiled: CompiledKernel) -> Callable[[], float]:
        us = self.times.get(source.code, 1000.0)
        if us is None:
            raise DeviceError(f"kernel {source.name} cannot run")

        def run() -> float:
            self.timed.append(source.code)
            return us

        return run


def tuner(clock: Clock | None, cache: DiskCache, **more: object) -> Tuner:
    given = {
        "target": target(ARCH),
        "device_name": "A GPU",
        "stopwatch": clock.of if clock else None,
        "jobs": 2,
        **more,
    }
    return Tuner(cache=cache, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> DiskCache:
    """Compiled kernels for all tests of this file; winners go to caches of their own."""
    return DiskCache(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def cache(tmp_path, kernels, monkeypatch) -> DiskCache:
    compile_kernels = autotune.nvrtc.compile_kernels

    def compiled_once(*args: object, **options: object) -> list[CompiledKernel]:
        return compile_kernels(*args, **{**options, "cache": kernels})  # type: ignore[arg-type]

    monkeypatch.setattr(autotune.nvrtc, "compile_kernels", compiled_once)
    return DiskCache(tmp_path / "cache")


# ---- schedules


@pytest.mark.parametrize("name", GRAPHS)
def test_candidates_are_different_kernels_and_the_best_guess_is_first(name):
    spec, _ = only(GRAPHS[name]())
    for arch in (PORTABLE, target("sm_75"), target(ARCH)):
        found = schedules(spec, arch)
        assert found[0] == best_schedule(spec, arch)
        assert 2 <= len(found) == len({render(spec, s).code for s in found})
        assert render(spec, None, arch) == render(spec, found[0])


@pytest.mark.parametrize("name", GRAPHS)
def test_schedules_survive_json(name):
    for s in schedules(only(GRAPHS[name]())[0]):
        data = json.loads(json.dumps(schedule_data(s)))
        assert schedule_from_data(data) == s
        assert schedule_text(s).startswith(data["type"] + " ")
    for broken in ({**data, "type": "other"}, {**data, "more": 1}, {"type": data["type"]}, {}):
        with pytest.raises(ValueError, match="is no schedule"):
            schedule_from_data(broken)


def test_a_schedule_of_another_family_is_refused():
    with pytest.raises(TypeError, match="is no schedule of a PointwiseSpec"):
        render(only(pointwise())[0], best_schedule(only(product())[0]))


def test_every_architecture_that_nvrtc_knows_has_a_target():
    for name in supported_archs():
        found = target(name)
        assert found.arch.major * 10 + found.arch.minor <= int(name.removeprefix("sm_").rstrip("a"))
    assert not target("sm_75").arch.has_cp_async
    with pytest.raises(ValueError, match="'sm_x' is no target"):
        target("sm_x")


# ---- which wins


def test_a_later_candidate_wins_only_if_it_is_clearly_faster():
    assert winner({0: 100.0, 1: 99.0, 2: 98.1}) == 0
    assert winner({0: 100.0, 1: 99.0, 2: 97.9}) == 1
    assert winner({3: 10.0, 1: 10.0}) == 1
    assert winner({2: 5.0}) == 2


@pytest.mark.parametrize(("times", "expected"), [((50, 49.5, 60), 0), ((50, 40, 39.5), 1), ((50, 40, 30), 2)])
def test_the_fastest_is_chosen_and_remembered(cache, times, expected):
    spec, group = only(pointwise())
    clock = Clock(spec, times)
    choice = tuner(clock, cache).tune(spec, group)
    assert choice.schedule == schedules(spec, target(ARCH))[expected]
    assert choice.us == times[expected]
    assert clock.given == [(*group.reads, *group.writes)]
    words = "as the cost model chose" if expected == 0 else "50.0 us untuned"
    assert choice.reason == f"tuned: {times[expected]:.1f} us, {words}"
    # Another process, another tuner: nothing is timed again.
    later = DiskCache(cache.folder)
    silent = Clock(spec, ())
    assert tuner(silent, later).tune(spec, group) == choice == tuner(silent, later).remember(spec, group)
    assert not silent.given
    assert not silent.timed


def test_slow_candidates_are_run_less_often(cache):
    spec, group = only(pointwise())
    clock = Clock(spec, (100.0, 101.0, 200.0, 30_000.0))
    tuner(clock, cache).tune(spec, group)
    runs = [clock.timed.count(code) for code in clock.times]
    first = 1 + autotune.FIRST_ROUND
    assert runs == [first + autotune.SECOND_ROUND, first + autotune.SECOND_ROUND, first, 1]


def test_a_candidate_that_cannot_run_is_passed_over(cache):
    spec, group = only(pointwise())
    choice = tuner(Clock(spec, (None, 70.0, None, 60.0)), cache).tune(spec, group)
    assert choice.schedule == schedules(spec, target(ARCH))[3]
    assert choice.reason == "tuned: 60.0 us, untuned it cannot run"
    assert tuner(None, cache).remember(spec, group) == choice
    other, its_group = only(pointwise(size=1024))
    with pytest.raises(DeviceError, match="cannot run"):
        tuner(Clock(other, [None] * 20), cache).tune(other, its_group)


def test_a_kernel_that_fails_while_it_is_timed_is_an_error(cache):
    spec, group = only(pointwise())

    def broken(source: KernelSource, compiled: CompiledKernel) -> Callable[[], float]:
        def run() -> float:
            raise DeviceError("an illegal address")

        return run

    with pytest.raises(DeviceError, match="illegal address"):
        tuner(None, cache, stopwatch=lambda _: broken).tune(spec, group)
    assert tuner(None, cache).remembered(spec) is None


def test_without_memory_for_scratch_arrays_the_cost_model_decides(cache):
    spec, group = only(pointwise())

    def full(_: Sequence[Tensor]) -> Clock:
        raise DeviceError("out of memory")

    choice = tuner(None, cache, stopwatch=full).tune(spec, group)
    assert (choice.schedule, choice.reason) == (best_schedule(spec), "cost model; not tuned: out of memory")
    assert tuner(None, cache).remembered(spec) is None


# ---- what it is remembered under


def test_winners_are_kept_by_what_they_depend_on(cache, monkeypatch):
    spec, group = only(pointwise())
    tuned = tuner(Clock(spec, (50, 40, 30)), cache).tune(spec, group)
    assert tuned.schedule != best_schedule(spec)
    assert tuner(None, cache).remember(spec, group) == tuned
    others = [
        tuner(None, cache, device_name="Another GPU"),
        tuner(None, cache, target=target("sm_90")),
        tuner(None, cache, options=["--fmad=false"]),
    ]
    assert all(t.remember(spec, group).reason == "cost model" for t in others)
    wider = only(pointwise(size=8192))[0]
    assert tuner(None, cache).remember(wider, group).reason == "cost model"
    monkeypatch.setattr(autotune, "sources_digest", lambda: "another version")
    assert tuner(None, cache).remember(spec, group).reason == "cost model"


def test_the_same_kernel_of_another_graph_has_the_same_fingerprint():
    graph = fg.Graph("other")
    p, q = graph.tensor("p", (64, 4096)), graph.tensor("q", (64, 4096))
    graph.output(graph.relu(p * q + p), name="result")
    spec = only(pointwise())[0]
    assert fingerprint(only(graph)[0]) == fingerprint(spec)
    assert fingerprint(only(pointwise(dtype="bfloat16"))[0]) != fingerprint(spec)
    operand = replace(spec.program.loads[0], alignment=1)
    unaligned = replace(spec, program=replace(spec.program, loads=(operand, *spec.program.loads[1:])))
    assert fingerprint(unaligned) != fingerprint(spec)
    prints = [fingerprint(only(make())[0]) for make in GRAPHS.values()]
    assert len(set(prints)) == len(prints)


def test_an_unreadable_entry_counts_as_none(cache):
    spec, group = only(pointwise())
    watched = tuner(Clock(spec, (50, 40)), cache)
    for entry in (b"", b"{}", b"[1]", b'{"schedule": {"type": "old"}, "us": 1, "untuned_us": 1}', b"\xff"):
        cache.put(watched._key(spec), entry)
        assert watched.remember(spec, group).reason == "cost model"
    assert watched.tune(spec, group).reason.startswith("tuned")


# ---- how it is asked for


def test_the_environment_decides_where_the_caller_does_not(monkeypatch):
    monkeypatch.delenv("FUSEGRAPH_AUTOTUNE", raising=False)
    assert [wanted(x) for x in (None, True, False)] == [None, True, False]
    for text, expected in (("1", True), ("0", False), ("", None)):
        monkeypatch.setenv("FUSEGRAPH_AUTOTUNE", text)
        assert [wanted(x) for x in (None, True, False)] == [expected, True, False]
    monkeypatch.setenv("FUSEGRAPH_AUTOTUNE", "yes")
    with pytest.raises(FusegraphError, match="FUSEGRAPH_AUTOTUNE is 'yes'"):
        wanted(None)


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_timing_needs_a_gpu(cache):
    with pytest.raises(DeviceError, match="autotune=True times kernels on a GPU, and there is none"):
        fg.compile(pointwise(), "cuda", target=ARCH, autotune=True)
    assert fg.compile(pointwise(), "cuda", target=ARCH).plan.kernels[0].choice.reason == "cost model"


def test_an_unknown_architecture_is_refused(cache):
    with pytest.raises(CompileError, match="'hopper' is no target"):
        fg.compile(pointwise(), "cuda", target="hopper", cache=cache)
    with pytest.raises(CompileError, match="does not compile for 'sm_91'"):
        fg.compile(pointwise(), "cuda", target="sm_91", cache=cache)


class _Properties:
    name, arch, compute_capability = "A GPU", "sm_80", (8, 0)


def test_remembered_winners_are_used_unless_told_otherwise(cache, monkeypatch):
    spec, group = only(pointwise())
    monkeypatch.setattr(driver, "available", lambda: True)
    monkeypatch.setattr(driver, "properties", lambda _: _Properties)
    clock = Clock(spec, (50, 40, 30))
    monkeypatch.setattr(autotune, "DeviceStopwatch", lambda tensors, device: clock)
    choose, later, *_ = choosers(target("sm_80"), 0, None, cache)
    assert choose(spec, group).reason == "cost model"
    choose, later, *_ = choosers(target("sm_80"), 0, True, cache)
    assert later(spec, group).reason == "cost model"  # a call that waits for a kernel is no time to tune
    tuned = choose(spec, group)
    assert tuned.reason == "tuned: 30.0 us, 50.0 us untuned"
    assert choosers(target("sm_80"), 0, None, cache)[0](spec, group) == tuned
    assert choosers(target("sm_80"), 0, False, cache)[0](spec, group).reason == "cost model"
    with pytest.raises(DeviceError, match="cannot time kernels for sm_90a on A GPU, which is sm_80"):
        choosers(target("sm_90a"), 0, True, cache)


def test_kernels_say_which_schedule_they_have_and_why(cache):
    spec, _ = only(pointwise())
    made = plan(pointwise(), choose=tuner(Clock(spec, (50, 40, 30)), cache).tune)
    (facts,) = describe(made)["kernels"]
    chosen = schedules(spec, target(ARCH))[2]
    assert facts["schedule"] == schedule_data(chosen)
    assert facts["chosen_by"] == "tuned: 30.0 us, 50.0 us untuned"
    assert made.kernels[0].source == render(replace(spec, name=made.kernels[0].name), chosen)
    text = " ".join(explain_text(describe(made)).split())
    assert f"schedule {schedule_text(chosen)} (tuned: 30.0 us, 50.0 us untuned)" in text


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not driver.available(), reason="needs a GPU")
@pytest.mark.parametrize("name", GRAPHS)
def test_tuning_on_the_device(tmp_path, name):
    from fusegraph.report.check import check_executable, random_inputs

    cache = DiskCache(tmp_path)
    graph = GRAPHS[name]()
    tuned = graph.compile("cuda", autotune=True, cache=cache)
    assert all(k.choice.reason.startswith("tuned: ") and k.choice.us > 0 for k in tuned.plan.kernels)
    again = graph.compile("cuda", cache=DiskCache(tmp_path))
    assert [k.choice for k in again.plan.kernels] == [k.choice for k in tuned.plan.kernels]
    assert check_executable(again, random_inputs(graph, 0)).ok
