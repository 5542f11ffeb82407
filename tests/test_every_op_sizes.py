"""Every op of the table with sizes that vary: right at all sizes, on kernels that were compiled once."""

from __future__ import annotations

import pytest
from chosen_sizes import some_sizes
from dim_cases import CASES, build
from graphs import ARCHS, share

from fusegraph.engines.sized import SizedExecutable
from fusegraph.lowering.base import Options
from fusegraph.ops import TABLE
from fusegraph.ranges import SizedPlan, plan_ranges
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.runtime import host_compiler, nvrtc
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.targets import named

#: Cases whose kernels differ most from each other; the others are left to the slow tier.
QUICK = {"pointwise add", "cumsum", "topk", "gather"}  # others are in test_dims.py
#: Offsets of packed sequences are in order and targets are numbers of classes, which random inputs are not.
LEFT = {"sdpa packed", "linear_cross_entropy"}
CHECKED = [name for name in CASES if name not in LEFT]
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CHECKED]
#: One in so many cases is also run on kernels for Hopper, and compiled by NVRTC.
SOME = 16


def plans(name: str, target: str) -> SizedPlan:
    return plan_ranges(build(name), Options(target=named(target)))


def check_sizes(name: str, target: str | None, count: int, patch: pytest.MonkeyPatch) -> None:
    """Checks random sizes of a case against the reference; nothing is compiled for them."""
    graph = build(name)
    executable = graph.compile("cpu", target=target)
    assert isinstance(executable, SizedExecutable)
    (planned,) = executable.plans
    assert planned.by_size == []
    patch.setattr(host_compiler, "build", None)
    for sizes in some_sizes(graph, count):
        assert planned.known(sizes) is not None, f"{name} at {sizes} is planned by size"
        at = executable.at(sizes)
        result = check_executable(at, random_inputs(at.graph, 1))
        assert result.ok, f"{name} at {sizes}: {result}"


def test_cases_have_every_op() -> None:
    assert {node.op.name for name in CASES for node in build(name).nodes} == set(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_sizes_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sizes(name, None, 4, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED[::SOME])
def test_all_sizes_are_right_on_kernels_for_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sizes(name, "h200", 4, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_all_sizes_compile_for_gpus(arch: str) -> None:
    for name in share(arch, CHECKED)[:: 2 * SOME]:
        found = plans(name, "h200" if arch == "sm_90a" else arch)
        assert found.by_size == [], f"{name}: {found.by_size[0]}"
        nvrtc.compile_kernels(found.sources, arch, cache=default_cache())
