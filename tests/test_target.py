"""Targets: named and read from devices, and nowhere else a number of a machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fusegraph as fg
from codegen.target import MIB, PORTABLE, TARGETS, Target, of_device, target
from fusegraph.errors import CompileError
from fusegraph.lowering.base import Options
from fusegraph.passes.split_contractions import best_cut
from fusegraph.plan import plan

ROOT = Path(__file__).resolve().parent.parent
#: Those who plan: they take a target, and know none by name.
PLANNING = [
    *(ROOT / "fusegraph" / "passes").glob("*.py"),
    *(ROOT / "fusegraph" / "lowering").glob("*.py"),
    ROOT / "fusegraph" / "plan.py",
    *(p for p in (ROOT / "codegen").rglob("*.py") if p.name not in ("target.py", "arch.py")),
]
MACHINE = re.compile(r"\b(H100|H200|B200|A100|L40S?|RTX|[45]090)\b|Hopper chip", re.IGNORECASE)
COUNTS = {t.sms for t in TARGETS.values()} - {128}
MAKERS = {"arch", "target", "of_device", "from_compute_capability"}


def offences(text: str) -> list[str]:
    """Returns the places in a module's text that depend on a machine."""
    tree = ast.parse(text)
    found = [f"line {n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if MACHINE.search(line)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in MAKERS and any(isinstance(a, ast.Constant) for a in node.args):
                found.append(f"line {node.lineno}: {called}(...)")
        if isinstance(node, ast.ImportFrom) and node.module == "codegen.target":
            more = {alias.name for alias in node.names} - {"Target", "PORTABLE", "target"}
            found += [f"line {node.lineno}: imports {name}" for name in more]
        if isinstance(node, ast.Constant) and node.value in COUNTS:
            found.append(f"line {node.lineno}: {node.value}")
    return found


@pytest.mark.parametrize(
    "text",
    [
        'SMS = arch("sm_90a").sms',
        'h = codegen.target("h200")',
        "from codegen.target import TARGETS",
        "BLOCKS = 132",
        "RATE = 2200  # bytes a cycle of an H200",
    ],
)
def test_what_knows_a_machine_is_found(text: str) -> None:
    assert offences(text)


@pytest.mark.slow
def test_cost_models_and_passes_know_no_machine() -> None:
    assert len(PLANNING) > 100
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in PLANNING}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_names() -> None:
    assert target("a100") is target("sm_80") is TARGETS["a100"]
    assert [target(f"sm_{n}").name for n in ("89", "90a", "100a", "120a")] == ["l40s", "h200", "b200", "rtx5090"]
    assert {t.name: t.arch.name for t in map(target, ("sm_86", "sm_90", "sm_103", "sm_121", "sm_75"))} == {
        name: name for name in ("sm_86", "sm_90", "sm_103", "sm_121", "sm_75")
    }
    assert [target(f"sm_{n}").sms for n in (75, 86, 90, 120, 121)] == [108, 108, 132, 170, 170]
    assert "of another machine: sms" in target("sm_86").origins
    assert "measured: l2_bytes, clock" in target("h200").origins
    for name in ("h201", "sm_9", "SM_80", ""):
        with pytest.raises(ValueError, match=r"is no target and no architecture; known: a100, .*rtx5090, sm_80"):
            target(name)
    graph = fg.Graph("relu")
    graph.output(graph.relu(graph.tensor("x", (4,))))
    with pytest.raises(CompileError, match="'h201' is no target"):
        graph.compile("cpu", target="h201")


def test_devices() -> None:
    def device(title: str, capability: tuple[int, int], sms: int, memory_rate: float = 7e5) -> Target:
        return of_device(title, capability, sms, 48 * MIB, 1900, memory_rate)

    assert device("NVIDIA H200", (9, 0), 132, 4.917e6) is TARGETS["h200"]
    assert device("NVIDIA H100 80GB HBM3", (9, 0), 132, 3.352e6) is TARGETS["h100"]
    assert device("NVIDIA H100 NVL", (9, 0), 132, 3.9e6).memory_rate == 3.9e6
    assert device("NVIDIA A100-PCIE-40GB", (8, 0), 108, 1.555e6).memory_rate == 1.555e6
    own = device("NVIDIA H100 PCIe", (9, 0), 114)
    assert (own.arch.name, own.sms, own.l2_bytes, own.clock, own.memory_rate) == ("sm_90a", 114, 48 * MIB, 1900, 7e5)
    assert (own.mma, own.clusters_of(3)) == (TARGETS["h200"].mma, 38)
    assert "of another machine: mma" in own.origins
    assert device("NVIDIA RTX 4000 Ada", (8, 9), 48).arch.name == "sm_89"
    with pytest.raises(ValueError, match=r"compute capability 7\.0"):
        device("NVIDIA V100", (7, 0), 80)


def test_figures_are_said_to_be_measured_or_assumed() -> None:
    fields = set(Target.__dataclass_fields__)
    for t in (*TARGETS.values(), PORTABLE):
        assert {*t.measured, *t.assumed} <= fields
        assert not set(t.measured) & set(t.assumed)
    assert TARGETS["h200"].clusters_of(3) == 39
    assert PORTABLE.planned is TARGETS["h200"]


@pytest.mark.parametrize(
    ("name", "tensor_tflops", "float32_tflops"),  # as published, without sparsity, of tensor cores with sums in float32
    [("a100", 312, 19.5), ("l40s", 366.5, 91.6), ("rtx4090", 165.2, 82.6), ("rtx5090", 209.5, 104.8)],
)
def test_figures_come_to_the_published_peaks(name: str, tensor_tflops: float, float32_tflops: float) -> None:
    t = TARGETS[name]
    assert 2 * t.mma * t.sms * t.clock / 1e6 == pytest.approx(tensor_tflops, rel=1e-3)
    assert 2 * t.fma * t.sms * t.clock / 1e6 == pytest.approx(float32_tflops, rel=1e-3)


def test_plans_follow_the_target() -> None:
    graph = fg.Graph("product", io_dtype="bfloat16")
    graph.output(graph.matmul(graph.tensor("a", (128, 65536)), graph.tensor("b", (65536, 128))))
    (node,) = graph.nodes
    parts = {name: best_cut(node, graph, target(name))[0] for name in ("a100", "h200", "rtx4090")}
    assert parts["h200"] == best_cut(node, graph, PORTABLE.planned)[0]
    assert parts["rtx4090"] < min(parts["a100"], parts["h200"]), parts

    rows = fg.Graph("rows")
    rows.output(rows.reduction(rows.tensor("x", (128, 1 << 20)), "add", 1))
    kernels = {name: len(plan(rows, Options(target=target(name))).kernels) for name in ("a100", "h200", "rtx5090")}
    assert kernels == {"a100": 1, "h200": 1, "rtx5090": 2}

    wide = fg.Graph("wide", io_dtype="bfloat16")
    wide.output(wide.softmax(wide.tensor("x", (120, 65536))))
    blocks = {name: plan(wide, Options(target=target(name))).kernels[0].source.grid[0] for name in ("a100", "h200")}
    assert blocks["a100"] == 120 < blocks["h200"]
