"""1,000 sizes of whole models, each compiled once: calls get as far as the launches, which are checked and not made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from codegen.spec import KernelSource
from fusegraph.bench.sizes.cases import Case, cases
from fusegraph.bench.sizes.run import inputs_of
from fusegraph.bench.torch_engines import on_engine
from fusegraph.bench.zoo.models import MODELS, called
from fusegraph.engines.sized import SizedExecutable
from fusegraph.report.check import random_inputs, run
from fusegraph.runtime import host_compiler

MODELS_OF = {case.name: case for case in cases(bool, small=True) if case.graph is None}
GRAPHS_OF = {case.name: case for case in cases(bool, small=True) if case.graph is not None}
SIZES = 1000


class Compiler:
    """Stands in for the host's compiler: counts what it is given, and the launches of kernels that it was given."""

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.launches = 0

    def __call__(self, kernels: Sequence[KernelSource], **_: Any) -> Any:
        self.compiled.append(len(kernels))
        return Module(self, tuple(kernels))


class Module:
    """Stands in for a module of kernels."""

    def __init__(self, compiler: Compiler, kernels: tuple[KernelSource, ...]) -> None:
        self.compiler, self.kernels = compiler, kernels

    def launch(self, number: int, arguments: Sequence[int], *, order: str, source: KernelSource) -> None:
        """Checks what the kernel would be launched with."""
        assert source.code == self.kernels[number].code
        host_compiler._check_dimensions(source, source.grid, source.block, source.dynamic_shared_bytes)
        host_compiler._parameters(source, arguments)
        self.compiler.launches += 1


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(host_compiler, "build", made)
    return made


def _sizes(case: Case, count: int) -> Iterator[dict[str, int]]:
    """Yields sizes of calls, and those at the bounds."""
    for end in (0, 1):
        yield {name: bounds[end] for name, bounds in case.bounds.items()}
    yield from (case.drawn(1, number) for number in range(count - 2))


def _check(name: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, *, learns: bool, count: int) -> None:
    """Calls a model at so many sizes."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("torchvision" if name.startswith("tv:") else "transformers")
    import fusegraph.torch

    case = MODELS_OF[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = MODELS[name].make(**case.changes).requires_grad_(learns)
    fusegraph.torch.report(clear=True)
    compiled = on_engine("fusegraph", called(module, list(case.operands)), dynamic=True)
    with torch.set_grad_enabled(learns):
        for number, sizes in enumerate(_sizes(case, count)):
            result = compiled(*inputs_of(case, sizes, "cpu", number))
            if learns:
                result.sum().backward()
            if not number:
                first = [len(compiler.compiled), len(fusegraph.torch.report())]
                assert first == [1 + learns, 1 + learns]
    assert [len(compiler.compiled), len(fusegraph.torch.report())] == first
    assert [(r.by_size, r.left) for r in fusegraph.torch.report(clear=True)] == [("", ())] * first[1]
    assert compiler.launches >= count * first[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS_OF)
def test_models_are_compiled_once(name: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(name, compiler, monkeypatch, learns=False, count=SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tv:resnet18", "hf:gpt2"])
def test_steps_of_training_are_compiled_once(name: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(name, compiler, monkeypatch, learns=True, count=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS_OF)
def test_graphs_are_compiled_once(name: str, compiler: Compiler) -> None:
    case = GRAPHS_OF[name]
    executable = case.built().compile("cpu")
    assert isinstance(executable, SizedExecutable)
    assert len(compiler.compiled) == 1
    for number, sizes in enumerate(_sizes(case, SIZES)):
        known = executable.at(sizes)
        run(known, random_inputs(known.graph, number))
    assert len(compiler.compiled) == 1
    assert compiler.launches >= SIZES
