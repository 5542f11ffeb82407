"""What the op table says of ops: all that has to be said is, and nobody else asks for an op's name."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

import fusegraph as fg
from fusegraph.bench.workload import GraphWorkload
from fusegraph.graph import Graph, Node
from fusegraph.ops import TABLE, scatter_parts, sort_runs, sparse_products, winograd
from fusegraph.ops.base import Kind, Op, Role
from fusegraph.ops.partial import PARTIAL
from fusegraph.ops.parts import PARTS
from fusegraph.ops.size import SIZE
from fusegraph.passes.decompose import NARROW
from fusegraph.plan import plan
from fusegraph.report.bounds import _propagated

ROOT = Path(__file__).parent.parent
#: Where ops are known by name: the table, what reads and writes other vocabularies, and what compares patterns.
NAMED = (
    "fusegraph/ops/",
    "fusegraph/frontends/",
    "fusegraph/lowering/cudnn",
    "fusegraph/pattern.py",
    "fusegraph/report/parts.py",
)

# ---- nobody asks for a name


def _is_op(e: ast.expr, variables: bool) -> bool:
    named = isinstance(e, ast.Name) and (e.id == "op" and variables)
    entry = isinstance(e, ast.Subscript) and isinstance(e.value, ast.Name) and e.value.id == "TABLE"
    return named or entry or (isinstance(e, ast.Attribute) and e.attr == "op")


def _is_name(e: ast.AST, variables: bool) -> bool:
    return isinstance(e, ast.Attribute) and e.attr == "name" and _is_op(e.value, variables)


def _holds_name(e: ast.AST, variables: bool) -> bool:
    """Tells whether a value is an op's name, or has some."""
    inner = () if isinstance(e, (ast.JoinedStr, ast.Call)) else ast.iter_child_nodes(e)
    return _is_name(e, variables) or any(_holds_name(x, variables) for x in inner)


def _known_as(nodes: Iterable[ast.AST], variables: bool) -> set[str]:
    """Returns the variables that an op's name, or several names, are assigned to."""
    found = set()
    for n in nodes:
        if isinstance(n, (ast.Assign, ast.NamedExpr)):
            for target in n.targets if isinstance(n, ast.Assign) else [n.target]:
                several = isinstance(target, ast.Tuple) and isinstance(n.value, ast.Tuple)
                pairs = zip(target.elts, n.value.elts) if several else [(target, n.value)]
                found |= {a.id for a, b in pairs if isinstance(a, ast.Name) and _holds_name(b, variables)}
    return found


def comparisons(source: str, variables: bool = True) -> Iterator[int]:
    """Yields the lines that compare an op, or its name, with anything but another node's op or None."""
    tree = ast.parse(source)
    every = [*ast.walk(tree)]
    scopes = [(every, set[str]())]
    for function in every:
        if isinstance(function, ast.FunctionDef) and (known := _known_as(inside := [*ast.walk(function)], variables)):
            scopes.append((inside, known))
    for nodes, known in scopes:

        def asks(e: ast.AST, known: set[str] = known) -> bool:
            inner = (
                e.elts if isinstance(e, (ast.Tuple, ast.List, ast.Set)) else e.args if isinstance(e, ast.Call) else ()
            )
            own = _is_name(e, variables) or _is_op(e, variables) or (isinstance(e, ast.Name) and e.id in known)
            return own or any(asks(x) for x in inner if not isinstance(e, ast.Call) or _is_set(e))

        for n in nodes:
            if isinstance(n, ast.Compare):
                sides = [n.left, *n.comparators]
                none = any(isinstance(x, ast.Constant) and x.value is None for x in sides)
                ops = all(isinstance(x, ast.Attribute) and x.attr == "op" for x in sides)
                if not none and not ops and any(map(asks, sides)):
                    yield n.lineno
            elif isinstance(n, ast.Match) and asks(n.subject):
                yield n.lineno
            elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in _PARTS_OF_NAMES:
                yield from [n.lineno] * asks(n.func.value)


_PARTS_OF_NAMES = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "split")


def _is_set(e: ast.expr) -> bool:
    return (
        isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id in ("set", "frozenset", "tuple", "list")
    )


def test_nobody_asks_for_an_ops_name():
    found = []
    for folder, variables in (("fusegraph", True), ("codegen", False)):  # there, op is an operand
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(NAMED):
                found += [f"{name}:{line}" for line in comparisons(path.read_text(), variables)]
    assert not found, f"ask for a role, a cost or another trait (`fusegraph/ops/base.py`): {found}"


@pytest.mark.parametrize(
    "line",
    [
        'node.op.name == "add"',
        'node.op.name in ("add", "sub")',
        "node.op.name not in CHEAP",
        "node.op is PARTIAL",
        'node.op is not TABLE["reduction"]',
        "node.op in (A, B)",
        'node.op.name.startswith("cmp_")',
        'any(n.op.name == "relu" for n in nodes)',
        'op.name in ("identity", "binary_select")',
        '(name, value) == ("a", 1) if (name := node.op.name) else 0',
    ],
)
def test_a_question_for_a_name_is_seen(line):
    assert list(comparisons(f"def f(node, nodes, op, value):\n    return {line}"))


def test_a_name_that_is_kept_is_seen():
    assert list(comparisons("def f(nodes):\n    names = [n.op.name for n in nodes]\n    return set(names) <= PAIRS"))
    assert list(comparisons("def f(node):\n    name, x = node.op.name, node.inputs\n    return name == 'add'"))


def test_other_questions_are_not():
    for line in (
        "a.op is b.op",
        "op is not None",
        "node.op.role is Role.CAST",
        "TABLES[node.op.name]",
        "f.get(node.op)",
    ):
        assert not list(comparisons(f"def f(a, b, op, node):\n    return {line}")), line


# ---- what has to be said


def _every() -> list[Op]:
    inner = [
        x
        for module in (scatter_parts, sort_runs, sparse_products, winograd)
        for x in vars(module).values()
        if isinstance(x, Op)
    ]
    return [*TABLE.values(), *PARTS.values(), *inner, PARTIAL, NARROW, SIZE]


def test_pointwise_ops_say_what_they_cost():
    assert all((op.cost is not None) == (op.kind is Kind.POINTWISE) for op in _every())
    with pytest.raises(TypeError, match="cost"):
        fg.ops.pointwise_math.unary("nothing", np.abs, "says nothing of itself")
    assert "nothing" not in TABLE


def test_ops_that_are_told_apart_have_roles():
    kinds = {Kind.MOVEMENT, Kind.CONTRACTION, Kind.TRANSFORM, Kind.REDUCTION}
    assert all(op.role is not None for op in _every() if op.kind in kinds)
    found = {op.role for op in _every()}
    assert found - {None} == set(Role)


def test_what_is_made_of_products_counts_them():
    assert all(op.products is not None for op in TABLE.values() if op.kind is Kind.CONTRACTION)
    x, w, y = (2, 3, 8, 8), (5, 3, 3, 3), (2, 5, 6, 6)
    for name, operands in (("conv_fprop", (x, w)), ("conv_dgrad", (y, w)), ("conv_wgrad", (x, y))):
        graph = fg.Graph(name)
        inputs = [graph.tensor(f"{n}", shape) for n, shape in enumerate(operands)]
        graph.output(getattr(graph, name)(*inputs), name="result")
        assert GraphWorkload(graph).flops == 2 * (2 * 5 * 36) * 27


@pytest.mark.parametrize("op", [op for op in TABLE.values() if op.kind is Kind.POINTWISE], ids=lambda op: op.name)
def test_nothing_turns_where_bounds_do_not_look(op):
    """An op that turns, or jumps, anywhere says so: else it leaves the bound between two ends far from 0."""
    integers = not {"float"} & set(op.cuda)
    if op.integers or not op.reads_values:
        pytest.skip("random numbers and positions depend on a shape")
    graph = Graph("one")
    dtypes = [fg.bool_ if key in op.masks else fg.int32 if integers else fg.float32 for key in op.operands]
    inputs = tuple(graph.tensor(key, (4000,), d) for key, d in zip(op.operands, dtypes))
    given = {
        "clamp": {"min": -1.0},
        "leaky_relu": {"negative_slope": 0.1},
        "leaky_relu_backward": {"negative_slope": 0.1},
        "narrow": {"dtype": "float16"},
    }
    node = graph.producer(graph.apply(op, inputs, given.get(op.name, {})))
    assert isinstance(node, Node)
    rng = np.random.default_rng(0)
    for k, dtype in enumerate(dtypes):
        if not dtype.is_bool:
            sizes = [10 ** rng.uniform(2 if n == k else 0.5, 2.3, 4000) for n in range(len(dtypes))]
            signed = [rng.choice([-1, 1], 4000) * size for size in sizes]
            values = [x > 0 if d.is_bool else x.astype(np.int32) if d.is_int else x for x, d in zip(signed, dtypes)]
            _check_between(node, values, k, np.floor(rng.uniform(10, 20, 4000)), rng)


def _check_between(node, values, k, apart, rng):
    """Checks that no change of operand ``k`` by up to ``apart`` moves the result far beyond its bound."""
    op, exact = node.op, np.zeros(4000)
    with np.errstate(all="ignore"):
        middle = np.asarray(op.reference(*values, **node.attributes))
        bound = _propagated(node, [(v, apart if n == k else exact) for n, v in enumerate(values)], middle)
        for _ in range(8):
            moved = [
                v + (np.rint(rng.uniform(-1, 1, 4000) * apart) * (n == k)).astype(v.dtype) for n, v in enumerate(values)
            ]
            off = np.abs(np.asarray(op.reference(*moved, **node.attributes)).astype(np.float64) - middle)
            beyond = np.isfinite(off) & (off > 2 * bound + 1e-6)
            assert not beyond.any(), f"{[v[beyond][0] for v in values]}: {off[beyond][0]} > {bound[beyond][0]}"


# ---- what names had hidden


@pytest.mark.parametrize("function", ["relu", "sigmoid"])
def test_a_long_product_of_what_is_computed(function):
    """The parts of a matrix product are one: of an operand that is computed in front of it, too."""
    graph = fg.Graph("long", io_dtype="bfloat16")
    x, w = graph.tensor("x", (64, 65536)), graph.tensor("w", (65536, 64))
    graph.output(graph.matmul(getattr(graph, function)(x), w), name="y")
    kernels = plan(graph).kernels
    assert [n.op.name for k in kernels for n in k.group.nodes if n.kind is not Kind.POINTWISE] == [
        "matmul_parts",
        "reduction",
    ]
