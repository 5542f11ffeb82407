"""The tensor-core forms of the contraction family on a GPU: every case that their tests run on the CPU."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import test_contraction_carry
import test_contraction_fp8_blocks
import test_contraction_matrix
import test_contraction_mma
import test_contraction_wgmma
from graphs import leave_out_pass
from kernel_cases import Case, describe

from codegen import best_schedule
from codegen.contraction import mma_schedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.declined import Declined
from codegen.spec import ContractionSpec
from codegen.target import Target
from fusegraph.engines import cuda
from fusegraph.engines.autotune import Choosers
from fusegraph.engines.cuda import CudaExecutable
from fusegraph.graph import Graph
from fusegraph.plan import Choice
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.runtime import driver

pytestmark = pytest.mark.gpu


class Collected(Exception):
    """Ends a test where it would run its cases."""


def collected(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Returns the cases that the tests of a module check."""
    found: list[Case] = []

    def collect(cases: Iterable[Case | Graph], **_: Any) -> None:
        found.extend(c if isinstance(c, Case) else Case(c) for c in cases)
        raise Collected

    checks = [name for name in ("passes", "check_cases", "check_all") if name in vars(module)]
    for name in checks:
        monkeypatch.setattr(module, name, collect)
    for name, test in list(vars(module).items()):
        if not (name.startswith("test_") and inspect.isfunction(test)):
            continue
        if any(f"{check}(" in inspect.getsource(test) for check in checks):
            for arguments in parameters(test):
                with contextlib.suppress(Collected):
                    test(**arguments)
    return found


def parameters(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yields what a test is parametrized with, but for what is marked as slow; nothing for those that take fixtures."""
    marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    if not marks:
        if not inspect.signature(test).parameters:
            yield {}
        return
    (mark,) = marks
    names = mark.args[0]
    for values in mark.args[1]:
        if not hasattr(values, "marks"):
            yield {names: values} if isinstance(names, str) else dict(zip(names, values))


def mma_first(spec: Any, arch: Target) -> Any:
    """Returns the best mma.sync schedule, or the best of any form if mma.sync declines."""
    if isinstance(spec, ContractionSpec):
        with contextlib.suppress(Declined):
            return mma_schedule.schedules(spec, arch)[0]
    return best_schedule(spec, arch)


def built(cases: Iterable[Case], monkeypatch: pytest.MonkeyPatch, otherwise: Any) -> list[CudaExecutable]:
    """Returns the cases' Executables, compiled in parallel, with their own schedules or those of ``otherwise``."""
    mine = threading.local()

    def choosers(here: Target, *_: Any) -> Any:
        schedule = mine.schedule

        def choose(spec: Any, _group: Any) -> Choice:
            if schedule is not None and isinstance(spec, ContractionSpec):
                return Choice(schedule(spec))
            return Choice(otherwise(spec, here))

        return Choosers(choose, choose, None)

    monkeypatch.setattr(cuda, "choosers", choosers)

    def build(case: Case) -> CudaExecutable:
        mine.schedule = case.schedule
        return CudaExecutable(case.graph, case.options, fusion=case.fusion, jobs=1)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(build, cases))


#: Those whose kernels are for Hopper alone.
HOPPER = test_contraction_wgmma, test_contraction_carry, test_contraction_fp8_blocks


@pytest.mark.parametrize("module", [*HOPPER, test_contraction_mma, test_contraction_matrix], ids=lambda m: m.__name__)
def test_every_case(module, monkeypatch, request):
    if not driver.available():
        pytest.skip("no CUDA driver")
    if module in HOPPER and not driver.properties(0).target.arch.has_wgmma:
        pytest.skip("no Hopper GPU")
    cases = collected(module, monkeypatch)
    assert len(cases) > (15 if module in (test_contraction_carry, test_contraction_fp8_blocks) else 50)
    otherwise = best_schedule
    if module is test_contraction_mma:
        otherwise = mma_first
        request.getfixturevalue("contractions_in_one_piece")
        leave_out_pass(monkeypatch, "operand layouts")
    wrong = []
    for number, (case, executable) in enumerate(zip(cases, built(cases, monkeypatch, otherwise))):
        given = case.inputs if case.inputs is not None else random_inputs(case.graph, number, special=case.special)
        result = check_executable(executable, given, strict=case.options.strict)
        if not result.ok:
            wrong.append(f"{case.label or describe(case.graph)}: {result}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} wrong", *wrong[:20]])


def test_the_forms_are_those_of_the_gpu(monkeypatch):
    """Without a schedule given, the GPU's architecture decides on the form."""
    if not driver.available() or not driver.properties(0).target.arch.has_wgmma:
        pytest.skip("no Hopper GPU")
    case = test_contraction_wgmma.matmul((256, 256), (256, 256), "bfloat16")
    made = case.graph.compile("cuda", autotune=False)
    assert isinstance(made.plan.kernels[0].choice.schedule, WgmmaSchedule)
