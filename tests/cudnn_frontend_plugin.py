"""A pytest plugin that runs tests written for cudnn-frontend, unchanged and without a GPU, against `from_cudnn`.

    python -m pytest -p tests.cudnn_frontend_plugin PATH/test/python/test_matmul_fuzzer.py

CUDA tensors are tensors of the host (`cuda_tensors`), handles of cuDNN's are dummies, and a ``cudnn.pygraph`` is read
by `from_cudnn`, compiled for an engine and run there.  A test passes or fails by its own comparison.  What is refused
is skipped with the reason, and at the end there is a count of the graphs: how many were built, were served, ran in a
test that passed, and were refused for what.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import cudnn
import pytest
import torch

from fusegraph.errors import NotSupportedError
from fusegraph.frontends.cudnn import CudnnGraph, from_cudnn
from fusegraph.graph import Graph, Node
from fusegraph.ops.base import Kind
from tests.cuda_tensors import install, on_host

#: What `cudnn.backend_version` answers: a cuDNN that has all that these tests ask for.
VERSION = 92400
_COUNTS = ("passed", "failed", "skipped", "graphs", "served", "right")


@dataclass
class Seen:
    """What became of a pygraph."""

    read: CudnnGraph | None = None
    refusal: str = ""
    ran: bool = False


@dataclass
class Record:
    """The graphs of the tests: those of the test that runs now, and the counts of each file."""

    now: list[Seen] = field(default_factory=list)
    files: dict[str, Counter[str]] = field(default_factory=dict)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    skipped: dict[str, Counter[str]] = field(default_factory=dict)
    blobs: dict[bytes, Any] = field(default_factory=dict)


RECORD = Record()
OPTIONS: dict[str, Any] = {"capability": (9, 0), "engine": "cpu", "operations": 0, "tests": 0, "seconds": 0}


# ---- pygraphs


def _refuse(seen: Seen, reason: str) -> NoReturn:
    seen.refusal = reason
    pytest.skip(f"refused: {reason}")


def _built(pygraph: Any, **_: Any) -> CudnnGraph:
    """Reads a pygraph and compiles it, once."""
    seen: Seen | None = getattr(pygraph, "_fusegraph_seen", None)
    if seen is None:
        seen = pygraph._fusegraph_seen = Seen()
        RECORD.now.append(seen)
        try:
            pygraph.validate()
            seen.read = from_cudnn(pygraph)
        except NotSupportedError as error:
            _refuse(seen, str(error))
        _lay_out(pygraph, seen.read)
        seen.read.build(engine=OPTIONS["engine"])
        _check_size(_operations(seen.read))
    if seen.read is None:
        pytest.skip(f"refused: {seen.refusal}")
    return seen.read


def _lay_out(pygraph: Any, read: CudnnGraph) -> None:
    """Sets the strides of the pygraph's results, as cuDNN does once it has inferred them."""
    for node in pygraph.nodes:
        for tensor in node.outputs.values():
            made = None if tensor is None else read.uids.get(tensor.uid)
            if made is None or tensor.is_virtual or tensor.ragged_offset is not None:
                continue
            if not tensor.dim_assigned:
                object.__setattr__(tensor, "dim", made.shape)
            if not tensor.stride_assigned:
                object.__setattr__(tensor, "stride", made.strides)


def _check_size(multiplications: int) -> None:
    if 0 < OPTIONS["operations"] < multiplications:
        pytest.skip(f"too large: {multiplications:.1e} multiplications, the bound is {OPTIONS['operations']:.1e}")


def _operations(graph: Graph) -> int:
    """Estimates the number of multiplications of a graph."""
    return sum(map(_multiplications, graph.nodes))


def _multiplications(node: Node) -> int:
    if node.kind is Kind.CONTRACTION:
        first, second = (t.shape for t in node.inputs[:2])
        if node.op.name.startswith("conv"):
            pixels, taps = {
                "conv_fprop": (node.output.shape, second),
                "conv_dgrad": (first, second),
                "conv_wgrad": (second, node.output.shape),
            }.get(node.op.name, (node.output.shape, second))
            return prod(pixels) * prod(taps[1:])
        return node.output.size * first[-1]
    if node.op.name.startswith("sdpa"):
        q, k = node.inputs[:2]
        return 2 * q.size * k.shape[-2]
    return sum(t.size for t in node.outputs)


def _execute(
    pygraph: Any,
    pack: Any,
    workspace: Any = None,
    handle: Any = None,
    override_uids: Any = None,
    override_shapes: Any = None,
    override_strides: Any = None,
    tensor_uids: Any = None,
) -> None:
    read = _built(pygraph)
    if tensor_uids is not None:
        pack = dict(zip(tensor_uids, pack))
    given = {key: on_host(array) for key, array in pack.items()}
    read.execute(given, on_host(workspace), None, override_uids, override_shapes, override_strides)
    pygraph._fusegraph_seen.ran = True


def _execute_at(pygraph: Any, pack: Any, workspace: Any = None, index: int = 0, *more: Any, **others: Any) -> None:
    _execute(pygraph, pack, workspace, *more, **others)


def _serialize(pygraph: Any, *, as_bytes: bool = False, **_: Any) -> Any:
    """Returns a name in place of a serialized graph: cuDNN's format is not read."""
    _built(pygraph)
    name = f"fusegraph {len(RECORD.blobs)}".encode()
    RECORD.blobs[name] = pygraph._fusegraph_seen
    return name if as_bytes else list(name)


def _deserialize(pygraph: Any, *args: Any, **_: Any) -> None:
    blob = next(a for a in args if isinstance(a, (bytes, list)))
    pygraph._fusegraph_seen = RECORD.blobs[bytes(blob)]


def _done(*_: Any, **__: Any) -> None: ...


def _only_cudnn(name: str) -> Callable[..., NoReturn]:
    def skip(*_: Any, **__: Any) -> NoReturn:
        pytest.skip(f"{name}: asks cuDNN about its own engines or the GPU")

    return skip


def _patch_cudnn() -> None:
    doubles: dict[str, Any] = {
        "_backend_lowerable": lambda self: False,  # validate is the Python part of it
        "build_operation_graph": lambda self: self.validate(),
        "create_execution_plans": _done,
        "check_support": lambda self, *_: _built(self) and None,
        "build_plans": lambda self, *_, **__: _built(self) and None,
        "build": lambda self, *_, **__: _built(self) and None,
        "get_workspace_size": lambda self, *_, **__: 0,
        "get_workspace_size_plan_at_index": lambda self, *_, **__: 0,
        "get_execution_plan_count": lambda self: int(hasattr(self, "_fusegraph_seen")),
        "get_plan_name_at_index": lambda self, _: "fusegraph",
        "get_behavior_notes": lambda self: [cudnn.behavior_note.RUNTIME_COMPILATION],
        "get_behavior_notes_for_plan_at_index": lambda self, _: [cudnn.behavior_note.RUNTIME_COMPILATION],
        "build_plan_at_index": lambda self, _: _built(self) and None,
        "execute": _execute,
        "execute_plan_at_index": _execute_at,
        "serialize": _serialize,
        "deserialize": _deserialize,
    }
    for name, double in doubles.items():
        setattr(cudnn.pygraph, name, double)
    for name in ("deselect_engines", "deselect_workspace_greater_than", "select_numeric_notes"):
        setattr(cudnn.pygraph, name, lambda self, *_: self)
    for name in ("get_engine_count", "get_knobs_for_engine", "create_execution_plan", "get_engine_and_knobs_at_index"):
        setattr(cudnn.pygraph, name, _only_cudnn(name))
    for name in ("create_device_properties", "create_kernel_cache"):
        setattr(cudnn, name, _only_cudnn(name))
    text = f"{VERSION // 10000}.{VERSION // 100 % 100}.{VERSION % 100}"
    for module in (cudnn, cudnn._pybind_module):
        module.backend_version, module.backend_version_string = lambda: VERSION, lambda: text
    cudnn.create_handle = lambda: cudnn.Handle(1, 0, 0)
    cudnn.destroy_handle = _done
    cudnn.set_stream = lambda handle, stream: setattr(handle, "stream", stream)


# ---- pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusegraph", "cudnn-frontend's tests against from_cudnn")
    group.addoption("--fusegraph-engine", default="cpu", help="engine that graphs are compiled for (cpu)")
    group.addoption("--fusegraph-capability", default="9.0", help="the GPU's answer, 9.0 (an H200) or 10.0, 12.0")
    group.addoption(
        "--fusegraph-operations", type=float, default=0, help="products of more multiplications are skipped"
    )
    group.addoption("--fusegraph-tests", type=int, default=0, help="so many of each test function's, evenly spread")
    group.addoption("--fusegraph-seconds", type=int, default=0, help="tests that take longer are skipped")
    group.addoption("--fusegraph-json", type=Path, help="file to put the counts in, those of other files are kept")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option = config.getoption
    major, minor = map(int, option("--fusegraph-capability").split("."))
    OPTIONS.update(
        capability=(major, minor),
        engine=option("--fusegraph-engine"),
        operations=option("--fusegraph-operations"),
        tests=option("--fusegraph-tests"),
        seconds=option("--fusegraph-seconds"),
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = OPTIONS["tests"]
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {
        item
        for found in functions.values()
        for item in (found if not 0 < most < len(found) else [found[k * len(found) // most] for k in range(most)])
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    RECORD.now.clear()
    limit = OPTIONS["seconds"]

    def stop(*_: Any) -> NoReturn:
        pytest.skip(f"too slow: more than {limit} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    name = report.nodeid.split("::")[0].rpartition("/")[2]
    counts = RECORD.files.setdefault(name, Counter())
    counts[report.outcome] += 1
    for seen in RECORD.now if report.when == "call" else ():
        counts["graphs"] += 1
        counts["served"] += seen.read is not None and not seen.refusal
        counts["right"] += seen.ran and report.passed
        if seen.refusal:
            RECORD.refused.setdefault(name, Counter())[reason_of(seen.refusal)] += 1
    if report.skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        text = text.removeprefix("Skipped: ")
        if not text.startswith("refused"):
            RECORD.skipped.setdefault(name, Counter())[text.partition(":")[0][:100]] += 1


def reason_of(refusal: str) -> str:
    """Returns the first reason for a refusal, without the names of the test's graph and tensors."""
    text = re.sub(r"pygraph '[^']*'( cannot be read:|,) ", "", refusal).split("; ")[0]
    return re.sub(r" \(uid \d+\)|^tensor '[^']*': | '[^']*'", "", text)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = results()
    terminalreporter.section("cudnn-frontend's graphs, by from_cudnn")
    for name, counts in found["files"].items():
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{counts.get(k, 0)} {k}" for k in _COUNTS))
    for what in ("refused", "not run"):
        for reason, number in _summed(found["files"], what).items():
            terminalreporter.write_line(f"{what}: {number} {reason}")
    if (file := config.getoption("--fusegraph-json")) is not None:
        before = json.loads(file.read_text("utf-8"))["files"] if file.exists() else {}
        found["files"] = dict(sorted({**before, **found["files"]}.items()))
        file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def results() -> dict[str, Any]:
    """The counts of a run, by test file."""
    bounds = ("operations", "tests", "seconds")
    capability = ".".join(map(str, OPTIONS["capability"]))
    given = [f"--fusegraph-capability={capability}", *(f"--fusegraph-{b}={OPTIONS[b]:g}" for b in bounds if OPTIONS[b])]
    files = {
        name: {
            "options": " ".join(given),
            **{key: counts[key] for key in _COUNTS},
            "refused": dict(RECORD.refused.get(name, Counter()).most_common()),
            "not run": dict(RECORD.skipped.get(name, Counter()).most_common()),
        }
        for name, counts in sorted(RECORD.files.items())
    }
    return {
        "cudnn-frontend": cudnn.__version__,
        "torch": torch.__version__,
        "engine": OPTIONS["engine"],
        "files": files,
    }


def _summed(files: dict[str, Any], what: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in files.values():
        total.update(counts[what])
    return dict(total.most_common())


install(lambda: OPTIONS["capability"], _check_size)
_patch_cudnn()
