"""The tensor-core forms of the contraction family on a GPU: every case that their tests run on the CPU."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import test_contraction_wgmma
from kernel_cases import Case, describe

from codegen import schedules, target
from codegen.contraction.wgmma_layout import WgmmaSchedule
from fusegraph.engines import cuda
from fusegraph.engines.cuda import CudaExecutable
from fusegraph.plan import Choice
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.runtime import driver

pytestmark = pytest.mark.gpu

MODULES = [test_contraction_wgmma]


def collected(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that the tests of a module check."""
    found: list[Case] = []
    monkeypatch.setattr(module, "passes", lambda cases, **_: found.extend(cases))
    for name, test in list(vars(module).items()):
        if name.startswith("test_") and inspect.isfunction(test) and "passes(" in inspect.getsource(test):
            for arguments in parameters(test):
                test(**arguments)
    return found


def parameters(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """What a test is parametrized with; nothing for those that take fixtures."""
    marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    if not marks:
        if not inspect.signature(test).parameters:
            yield {}
        return
    (mark,) = marks
    names = mark.args[0]
    for values in mark.args[1]:
        yield {names: values} if isinstance(names, str) else dict(zip(names, values))


def built(cases: Iterable[Case], monkeypatch: pytest.MonkeyPatch) -> list[CudaExecutable]:
    """The cases' Executables, with their schedules, compiled in parallel."""
    mine = threading.local()

    def choosers(arch: str, *_: Any) -> Any:
        choose = mine.schedule or (lambda spec: schedules(spec, target(arch))[0])
        return (lambda spec, _group: Choice(choose(spec))), (lambda spec, _group: Choice(choose(spec)))

    def build(case: Case) -> CudaExecutable:
        mine.schedule = case.schedule
        return CudaExecutable(case.graph, case.options, fusion=case.fusion, jobs=1)

    monkeypatch.setattr(cuda, "choosers", choosers)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(build, cases))


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_case(module, monkeypatch):
    if not driver.available():
        pytest.skip("no CUDA driver")
    if module is test_contraction_wgmma and not target(driver.properties(0).arch).has_wgmma:
        pytest.skip("no Hopper GPU")
    cases = collected(module, monkeypatch)
    assert len(cases) > 50
    wrong = []
    for number, (case, executable) in enumerate(zip(cases, built(cases, monkeypatch))):
        given = case.inputs if case.inputs is not None else random_inputs(case.graph, number, special=case.special)
        result = check_executable(executable, given, strict=case.options.strict)
        if not result.ok:
            wrong.append(f"{case.label or describe(case.graph)}: {result}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} wrong", *wrong[:20]])


def test_the_forms_are_those_of_the_gpu(monkeypatch):
    """Without a schedule given, the GPU's architecture decides on the form."""
    if not driver.available() or not target(driver.properties(0).arch).has_wgmma:
        pytest.skip("no Hopper GPU")
    case = test_contraction_wgmma.matmul((256, 256), (256, 256), "bfloat16")
    made = case.graph.compile("cuda", autotune=False)
    assert isinstance(made.plan.kernels[0].choice.schedule, WgmmaSchedule)
