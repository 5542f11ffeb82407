"""The registry of kernel families and forms: everything is in it once, and nothing else asks what a kernel is."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from graphs import elementary, filtered
from test_attention import CAUSAL, made
from test_attention_backward import made as gradients

import codegen
import fusegraph as fg
from codegen import render, schedule_data, schedule_from_data, schedule_text, schedules, target
from codegen.canonical import canonical
from codegen.families import FAMILIES, FORMS, family_of, form_of
from codegen.family import Form, Schedule
from codegen.spec import KernelSpec
from codegen.spec_data import spec_data, spec_from_data
from fusegraph.passes import fuse_gradients
from fusegraph.plan import by_cost_model, plan

ROOT = Path(codegen.__file__).parents[1]
ARCHS = ("sm_75", "sm_80", "sm_90a")


def subclasses(of: type) -> set[type]:
    """Imports all modules of codegen and returns the subclasses of a class in them."""
    for module in pkgutil.walk_packages(codegen.__path__, "codegen."):
        importlib.import_module(module.name)
    found: set[type] = set()
    left = [of]
    while left:
        left = [sub for cls in left for sub in cls.__subclasses__() if sub.__module__.startswith("codegen.")]
        found |= set(left)
    return found


def test_every_spec_is_a_familys() -> None:
    specs = [family.spec for family in FAMILIES]
    assert len(set(specs)) == len(specs)
    assert set(specs) == subclasses(KernelSpec)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_schedule_is_a_forms() -> None:
    classes = [form.schedule for family in FAMILIES for form in family.forms]
    assert len(set(classes)) == len(classes)
    assert set(classes) == subclasses(Schedule)
    assert all(len({form.name for form in family.forms}) == len(family.forms) for family in FAMILIES)


# ---- what the forms make of specifications


def graphs() -> Iterator[fg.Graph]:
    """Yields graphs that together have kernels of all forms on one architecture or another."""
    g = fg.Graph("pointwise")
    elementary(g, 64, 100)
    yield g
    g = fg.Graph("members")
    for n in range(5):
        g.output(g.relu(g.tensor(f"x{n}", (n + 1, 100))), name=f"y{n}")
        g.output(g.reduction(g.tensor(f"g{n}", (n + 1, 100)), "norm2"), name=f"norm{n}")
    yield g
    g = fg.Graph("transposed")
    g.output(g.tensor("a", (1024, 1024)) + g.tensor("b", (1024, 1024), strides=(1, 1024)), name="y")
    yield g
    for layout in ("NHWC", "NCHW"):
        g = fg.Graph(f"images {layout}", io_dtype="bfloat16")
        x = g.tensor("x", (2, 64, 32, 32), layout=layout)
        g.output(g.max_pool(x, window=(2, 2)), name="pooled")
        g.output(g.avg_pool(x, 3, 1, 1), name="smoothed")
        filtered(g, x, layout)
        yield g
    g = fg.Graph("groups", io_dtype="bfloat16")
    x = g.tensor("x", (2, 64, 16, 16), layout="NHWC")
    g.output(g.conv_fprop(x, g.tensor("w", (64, 8, 3, 3)), padding=1, groups=8), name="y")
    yield g
    g = fg.Graph("stem", io_dtype="bfloat16")
    y = g.conv_fprop(g.tensor("x", (2, 3, 64, 64)), g.tensor("w", (64, 3, 7, 7)), stride=2, padding=3)
    g.output(y, name="y", layout="NHWC")
    yield g
    g = fg.Graph("winograd")
    x = g.tensor("x", (1, 16, 16, 16))
    g.output(g.conv_fprop(x, g.tensor("w", (16, 16, 3, 3)), padding=1, algorithm="winograd_4x4"), name="y")
    yield g
    for rows in (64, 4):
        g = fg.Graph("product", io_dtype="bfloat16")
        g.output(g.tensor("a", (rows, 64)) @ g.tensor("b", (64, 64), strides=(1, 64)), name="y")
        yield g
    yield gradients(name="capped", rows=40, keys=40, results=3, soft_cap=5.0)
    yield made(name="thin", dtype="bfloat16", rows=4, keys=40)
    for dtype in ("bfloat16", "float32"):
        yield made(name=dtype, dtype=dtype, rows=40, keys=40)
        yield gradients(name=f"gradients {dtype}", dtype=dtype, rows=40, keys=40, results=3, **CAUSAL)


@pytest.fixture(scope="module")
def rendered() -> dict[Form[Any, Any], list[tuple[KernelSpec, Schedule]]]:
    """Yields specs and schedules of every form."""
    found: dict[Form[Any, Any], list[tuple[KernelSpec, Schedule]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse_gradients, "LEAST_KEYS", 1)
        for graph in graphs():
            for name in ARCHS:
                arch = target(name)
                for kernel in plan(graph, choose=by_cost_model(arch)).kernels:
                    spec = kernel.group.lowered.spec
                    assert kernel.group.family == family_of(spec).name
                    assert schedules(spec, arch)[0] == kernel.choice.schedule
                    for schedule in schedules(spec, arch):
                        assert form_of(schedule) in family_of(spec).forms
                        found.setdefault(form_of(schedule), []).append((spec, schedule))
    return found


def test_schedules_survive_json(rendered: dict[Form[Any, Any], list[tuple[KernelSpec, Schedule]]]) -> None:
    assert {form.schedule.__name__ for form in rendered} == {cls.__name__ for cls in FORMS}
    for made_of in rendered.values():
        for _, schedule in made_of:
            data = schedule_data(schedule)
            assert set(data) == {"type", *(f.name for f in fields(schedule))}  # complete, whatever the defaults
            assert schedule_from_data(json.loads(json.dumps(data))) == schedule


def test_specs_survive_json(rendered: dict[Form[Any, Any], list[tuple[KernelSpec, Schedule]]]) -> None:
    for made_of in rendered.values():
        for spec in {id(spec): spec for spec, _ in made_of}.values():
            again = spec_from_data(json.loads(json.dumps(spec_data(spec))))
            assert repr(again) == repr(canonical(spec))
    for wrong in ({}, {"is": "Nothing"}, {"is": "Operand"}, [], 3, {"dtype": "float32"}):
        with pytest.raises(ValueError, match="is no specification"):
            spec_from_data(wrong)


@pytest.mark.slow
def test_costs_are_those_that_schedules_are_ranked_by(
    rendered: dict[Form[Any, Any], list[tuple[KernelSpec, Schedule]]],
) -> None:
    arch = target("sm_90a")
    seen = set()
    for form, made_of in rendered.items():
        for spec, _ in made_of if form.cost is not None else ():
            every = tuple(form.schedules(spec, arch))
            costs = [form.cost(spec, schedule, arch) for schedule in every]
            assert all(0 < cost < float("inf") for cost in costs)
            if form.name != "mma":  # its schedules are ranked without the time between loads
                assert costs[:1] == [min(costs)][: len(costs)]
            seen.add(form.name)
    assert seen == {
        "thin",
        "wgmma",
        "mma",
        "halo",
        "stem",
        "stream",
        "simt",
        "staged",
        "patches",
        "strips",
        "flat",
        "slide",
        "planes",
        "channels",
    }


def test_text_says_what_is_unusual(rendered: dict[Form[Any, Any], list[tuple[KernelSpec, Schedule]]]) -> None:
    for made_of in rendered.values():
        for _, schedule in made_of:
            name, *said = schedule_text(schedule).split()
            text = {s.partition("=")[0] for s in " ".join(said).replace(", ", ",").split()}
            assert name == schedule_data(schedule)["type"]
            assert text == {f.name for f in fields(schedule) if f.default != getattr(schedule, f.name)} - {"itype"}


def test_schedules_of_other_families_are_refused(
    rendered: dict[Form[Any, Any], list[tuple[KernelSpec, Schedule]]],
) -> None:
    firsts = [made_of[0] for made_of in rendered.values()]
    for spec, _ in firsts:
        for other, schedule in firsts:
            if type(other) is not type(spec):
                with pytest.raises(TypeError, match="is no schedule of a"):
                    render(spec, schedule)


# ---- nothing else asks


def asked(function: ast.AST) -> set[str]:
    """Returns the classes of specs and schedules that a function tests a value for, by isinstance or match."""
    calls = (n for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    nodes: list[ast.AST] = [arg for n in calls if n.func.id in ("isinstance", "issubclass") for arg in n.args[1:]]
    nodes += [n.cls for n in ast.walk(function) if isinstance(n, ast.MatchClass)]
    named = (n for node in nodes for n in ast.walk(node))
    names = {n.id if isinstance(n, ast.Name) else n.attr for n in named if isinstance(n, ast.Name | ast.Attribute)}
    return {name for name in names if name.endswith(("Spec", "Schedule"))}


#: What is made of the registry alone.
GENERIC = ("codegen/__init__", "codegen/families", "codegen/family", "codegen/schedule", "fusegraph/lowering/__init__")


@pytest.mark.slow
def test_there_is_no_ladder() -> None:
    for name in GENERIC:
        assert not asked(ast.parse((ROOT / f"{name}.py").read_text())), name
    lowering = ast.parse((ROOT / "fusegraph/lowering/__init__.py").read_text())
    assert not any(isinstance(n, ast.If | ast.Match) for n in ast.walk(lowering))
    for path in (*(ROOT / "codegen").rglob("*.py"), *(ROOT / "fusegraph").rglob("*.py")):
        text = path.read_text()
        if "Spec" in text or "Schedule" in text:
            for function in ast.walk(ast.parse(text)):
                if isinstance(function, ast.FunctionDef):
                    assert len(asked(function)) < 3, (path, function.name, asked(function))


def test_a_ladder_is_found() -> None:
    ladder = "def f(s):\n if isinstance(s, RowsSpec): pass\n elif isinstance(s, a.ScanSpec | PoolSchedule): pass\n"
    assert asked(ast.parse(ladder)) == {"RowsSpec", "ScanSpec", "PoolSchedule"}
