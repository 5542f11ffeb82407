"""Torch's own database of operators (OpInfo), forward and backward, on the cpu engine against eager torch.

    python tests/torch_opinfo.py --samples 8 --dtypes float32,bfloat16 --part 1/4 [--only linalg]

Every case is one operator with one of the inputs that torch's tests call it with.  AOTAutograd traces it as it does for
`torch.compile`, its graphs are compiled by the backend, the kernels of many cases in one run of the host compiler, and
results and gradients are compared with eager torch's and with those of the same call in float64.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.frontends.torch import backend
from fusegraph.frontends.torch.decompositions import decompositions
from fusegraph.frontends.torch.random import drawn_in_kernels
from fusegraph.frontends.torch.report import report
from fusegraph.lowering.base import Options

# torch's tests forbid settings that outlive a `with`, for the whole process; other tests of ours make some.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
# What gives inputs looks for a test of torch's on the stack, by its source, which takes longer than all that is tested.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

#: Operators whose results are whatever was in memory.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
#: Operators with gradients that are differences of numbers near 1, which torch writes out otherwise than eager does.
CANCELLING = {
    "nn.functional.multi_head_attention_forward",
    "nn.functional.normalize",
    "nn.functional.soft_margin_loss",
}
#: Most elements of a case: the cpu engine runs a fiber a thread.
MOST = 1 << 16
#: Cases whose kernels are built together.
TOGETHER = 24


@dataclass
class Outcome:
    """The outcome of a case: "right", "wrong", "crashed" or "untraced" (torch does not trace it), and details."""

    name: str
    kind: str
    text: str = ""
    left: tuple[tuple[str, str], ...] = ()


@dataclass
class Case:
    """One operator with one of its inputs; ``tensors`` are those among them."""

    name: str
    op: Any
    dtype: Any
    leaves: list[Any]
    spec: Any
    programs: list[_Function] = field(default_factory=list)
    compiled: Callable[..., Any] | None = None

    @property
    def tensors(self) -> list[Any]:
        return [x for x in self.leaves if isinstance(x, torch.Tensor)]

    def call(self, *tensors: Any) -> list[Any]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        return [x for x in tree_leaves(self.op(first, *args, **kwargs)) if isinstance(x, torch.Tensor)]

    def draws(self) -> bool:
        """Tells whether the case draws random numbers, which differ in another dtype."""
        targets = (n.target for f in self.programs for n in f.module.graph.nodes)
        return any(torch.Tag.nondeterministic_seeded in getattr(t, "tags", ()) for t in targets)

    def in_float64(self) -> Case:
        def wide(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.dtype == self.dtype:
                return x.detach().double().requires_grad_(x.requires_grad)
            return torch.float64 if x is self.dtype else x

        return Case(self.name, self.op, torch.float64, [wide(x) for x in self.leaves], self.spec)


class _Function:
    """A graph that AOTAutograd gives to compile: torch interprets it until it has a program."""

    _boxed_call = True

    def __init__(self, module: Any, phase: str) -> None:
        self.module, self.phase = module, phase
        self.program: Callable[[list[Any]], Any] | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        if self.program is not None:
            return self.program(arguments)
        values = list(arguments)
        arguments.clear()
        return self.module(*values)


def cases(op: Any, dtype: Any, count: int, seed: int) -> Iterator[Case]:
    """Yields some of an operator's inputs, chosen by a seed, whose tensors are small and strided."""
    learns = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(seed)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=learns))
    chosen = random.Random(f"{seed} {op.name} {dtype}").sample(range(len(samples)), min(count, len(samples)))
    for number in sorted(chosen):
        sample = samples[number]
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if all(x.layout is torch.strided and x.numel() <= MOST for x in tensors):
            label = f"{op.name}{'.' * bool(op.variant_test_name)}{op.variant_test_name}"
            yield Case(f"{label} {str(dtype)[6:]} {number}", op, dtype, leaves, spec)


def _run(function: Callable[..., list[Any]], tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Runs a function; returns its results, and gradients for cotangents that are always the same."""
    torch.manual_seed(42)  # as some of the operators, which are functions of torch's tests, do themselves when traced
    results = function(*tensors)
    ends = [x for x in results if x.requires_grad]
    wanted = [x for x in tensors if x.requires_grad]
    if not ends or not wanted:
        return [x.detach() for x in results], []
    torch.manual_seed(1)
    loss = [torch.randn(x.shape, dtype=torch.float64).add(0.5).to(x.dtype) for x in ends]
    gradients = torch.autograd.grad(ends, wanted, loss, allow_unused=True)
    return [x.detach() for x in results], list(gradients)


def _trace(case: Case, rules: Any) -> str:
    """Traces with AOTAutograd; returns why it fails, or ""."""

    def compiler(phase: str) -> Callable[[Any, Any], _Function]:
        def compile_(module: Any, _: Any) -> _Function:
            case.programs.append(_Function(module, phase))
            return case.programs[-1]

        return compile_

    case.compiled = aot_function(
        case.call,
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=rules,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    try:
        with drawn_in_kernels(False):  # as in eager mode
            _run(case.compiled, case.tensors)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _compile(case: Case, made: list[CpuExecutable]) -> None:
    """Compiles a case's graphs with the backend; the kernels are built later."""

    def lazily(graph: Any, engine: str) -> CpuExecutable:
        executable = CpuExecutable(graph, Options(), lazy=True)
        assert executable.plan is not None
        made.append(executable)
        return executable

    original, backend.compile_graph = backend.compile_graph, lazily  # type: ignore[attr-defined]
    try:
        for function in case.programs:
            function.program = backend._function(function.module, function.phase, {}, {})
    finally:
        backend.compile_graph = original  # type: ignore[attr-defined]


def _difference(got: Any, eager: Any, exact: Any, scale: float) -> str:
    """Returns what is wrong with a result, "" if nothing is.

    Its error may be a multiple of eager's plus some units in the last place of the result, the largest result or a
    number summed in it.
    """
    if got is None or eager is None:
        return "" if got is eager else f"{type(got).__name__}, in eager {type(eager).__name__}"
    if (got.dtype, got.shape) != (eager.dtype, eager.shape):
        return f"{got.dtype} {list(got.shape)}, in eager {eager.dtype} {list(eager.shape)}"
    unit = torch.finfo(eager.dtype).eps if eager.is_floating_point() or eager.is_complex() else 0
    got, eager, exact = (None if x is None else _plain(x) for x in (got, eager, exact))
    if not eager.dtype.is_floating_point:
        return "" if torch.equal(got, eager) else _shown(got, eager, got != eager)
    exact = eager if exact is None or exact.shape != eager.shape else exact
    ours, theirs, true = (x.double() for x in (got, eager, exact))
    finite = theirs.isfinite() & true.isfinite()
    scale = max(scale, true[finite].abs().max().item() if finite.any() else 0.0)
    error = (theirs - true)[finite].abs().max().item() if finite.any() else 0.0
    allowed = 4 * error + 16 * unit * true.abs() + 4 * unit * scale
    same = (ours == theirs) | (ours.isnan() & theirs.isnan()) | (ours == true.to(got.dtype).double())
    good = same | (true.isfinite() & ((ours - true).abs() <= allowed))  # where eager overflows on the way, too
    good |= (true.abs() > torch.finfo(got.dtype).max) & ~ours.isfinite()  # sums that overflow do so in any order
    return "" if good.all() else _shown(got, exact, ~good)


def _plain(x: Any) -> Any:
    """Returns a tensor's elements as numbers of a type that torch computes with."""
    x = x.to_dense() if x.layout is not torch.strided else x
    if x.is_complex():
        return torch.view_as_real(x.to(torch.complex128).resolve_conj())
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _shown(got: Any, wanted: Any, bad: Any) -> str:
    where = bad.nonzero()[0].tolist() if bad.dim() else []
    pair = got[tuple(where)].item(), wanted[tuple(where)].item()
    return f"{int(bad.sum())} of {bad.numel()} elements: at {where} {pair[0]!r}, not {pair[1]!r}"


def _compare(case: Case) -> str:
    """Returns what is wrong with a case's results and gradients."""
    assert case.compiled is not None
    results, gradients = _run(case.compiled, case.tensors)
    eager = _run(case.call, case.tensors)
    try:
        if case.draws():
            raise NotImplementedError
        wide = case.in_float64()
        exact: Any = _run(wide.call, wide.tensors)
    except Exception:  # not every operator is there in float64
        exact = [None] * len(results), [None] * len(gradients)
    if case.op.name in UNDEFINED:
        results = eager[0]
    for kind, ours, theirs, true in zip(("result", "gradient"), (results, gradients), eager, exact):
        if len(ours) != len(theirs):
            return f"{len(ours)} {kind}s, in eager {len(theirs)}"
        true = true if len(true) == len(theirs) else [None] * len(theirs)
        for number, triple in enumerate(zip(ours, theirs, true)):
            text = _difference(*triple, scale=float(kind == "gradient" and case.op.name in CANCELLING))
            if text:
                return f"{kind} {number}: {text}"
    return ""


def check(every: Sequence[Case]) -> Iterator[Outcome]:
    """Compiles the cases together, and runs and compares them one by one."""
    ready: list[Case] = []
    made: list[CpuExecutable] = []
    left: dict[str, tuple[tuple[str, str], ...]] = {}
    for case in every:
        reason = _trace(case, dict(decompositions()))
        if reason:
            case.programs.clear()
            ours = not _trace(case, {})
            yield Outcome(case.name, "crashed" if ours else "untraced", reason)
            continue
        report(clear=True)
        try:
            _compile(case, made)
        except Exception as error:
            yield Outcome(case.name, "crashed", f"{type(error).__name__}: {error}"[:600])
            continue
        left[case.name] = tuple(dict.fromkeys((op, why) for r in report() for _, op, why in r.left))
        ready.append(case)
    try:
        build_together(made)
    except Exception:  # then one by one, where they are called
        print("the kernels of a group are not compiled", file=sys.stderr)
    for case in ready:
        try:
            text = _compare(case)
            yield Outcome(case.name, "wrong" if text else "right", text, left[case.name])
        except Exception as error:
            yield Outcome(case.name, "crashed", f"{type(error).__name__}: {error}"[:600], left[case.name])


def selection(part: int, parts: int, dtypes: Sequence[Any], count: int, seed: int, only: str = "") -> Iterator[Any]:
    """Yields (operator, dtype) of one part of the database; count 0 takes one dtype and one sample an operator."""
    for number, op in enumerate(op_db):
        if number % parts != part or not re.search(only, op.name):
            continue
        there = [d for d in dtypes if d in op.supported_dtypes("cpu")]
        if there and not count:
            there = [random.Random(f"{seed} {op.name}").choice(there)]
        yield from ((op, dtype) for dtype in there)


def run(part: int, parts: int, dtypes: Sequence[Any] = DTYPES, count: int = 0, seed: int = 0, only: str = "") -> Any:
    """Yields the outcomes of one part of the database."""
    waiting: list[Case] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, dtype in selection(part, parts, dtypes, count, seed, only):
            try:
                waiting += cases(op, dtype, max(count, 1), seed)
            except Exception as error:  # inputs that need what this machine has not
                yield Outcome(f"{op.name} {dtype}", "untraced", str(error)[:200])
            if len(waiting) >= TOGETHER:
                yield from check(waiting)
                waiting = []
        yield from check(waiting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="most samples of an operator and dtype")
    parser.add_argument("--dtypes", default="float32,bfloat16,int64,bool")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th operator from the K-th on")
    parser.add_argument("--only", default="", help="a regular expression that operators' names match")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    part, parts = map(int, chosen.part.split("/"))
    dtypes = [getattr(torch, name) for name in chosen.dtypes.split(",")]
    counts: Counter[str] = Counter()
    left: Counter[tuple[str, str]] = Counter()
    for outcome in run(part - 1, parts, dtypes, chosen.samples, chosen.seed, chosen.only):
        counts[outcome.kind] += 1
        left.update(outcome.left)
        if outcome.kind != "right":
            print(outcome.kind, outcome.name, outcome.text, flush=True)
    print(dict(counts))
    for (op, why), number in left.most_common():
        print(f"left {number:5} {op}: {why}")
    sys.exit(bool(counts["wrong"] or counts["crashed"]))


if __name__ == "__main__":
    main()
