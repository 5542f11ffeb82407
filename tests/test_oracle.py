"""What `check` judges by: the NumPy meaning of what users write, which shares nothing with the nodes it becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import are_right, executables, quick
from written_cases import CALLS, COMPOSITES, graphs

import fusegraph as fg
from fusegraph import meanings
from fusegraph.calls import means
from fusegraph.engines.reference import evaluate
from fusegraph.methods import METHODS
from fusegraph.ops import TABLE, Kind
from fusegraph.passes.decompose import decompose
from fusegraph.report.check import check, random_inputs

Array = np.ndarray[Any, Any]
#: How far the nodes' values may be from the meaning, relative to the largest: constants among them are float32 where
#: the operands are, and sdpa rounds its probabilities.
APART = {"float64": 1e-11, "float32": 4e-6, "float16": 4e-3, "bfloat16": 4e-2}


def test_every_composite_and_function_has_cases() -> None:
    composites = {name for name, op in TABLE.items() if op.kind is Kind.COMPOSITE or op.composite is not None}
    assert set(COMPOSITES) == composites
    assert set(CALLS) == set(METHODS) - set(TABLE) - {"cast", "gradients"}
    for name, builds in CALLS.items():
        for build in builds:
            g = fg.Graph("g")
            build(g)
            assert {call.name for call in g.calls.values()} == {name}


def _by_nodes(g: fg.Graph, inputs: dict[str, Array]) -> dict[fg.Tensor, Array]:
    """Evaluates the outputs by the nodes that composites and calls decompose into."""
    parts = decompose(g)
    calls, parts.graph.calls = parts.graph.calls, {}
    values = evaluate(parts.graph, inputs)
    parts.graph.calls = calls
    return {t: values[parts.counterparts[t]] for t in g.outputs}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", *quick("float64", "float32", "float16")])
@pytest.mark.parametrize("scale", quick(300, 1))
def test_the_nodes_are_what_is_meant(dtype: str, scale: int) -> None:
    for g in graphs({**COMPOSITES, **CALLS}, dtype):
        inputs = random_inputs(g, 1)
        for values in inputs.values():
            if values.dtype.kind not in "iub":
                values *= values.dtype.type(scale)
        with np.errstate(all="ignore"):
            meant, made = evaluate(g, inputs), _by_nodes(g, inputs)
        for t in g.outputs:
            largest = np.abs(np.where(np.isfinite(meant[t]), meant[t], 0)).max(initial=1e-30)
            np.testing.assert_allclose(made[t], meant[t], rtol=0, atol=APART[dtype] * largest, err_msg=f"{g.name} {t}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_are_what_is_meant(dtype: str) -> None:
    def inputs(g: fg.Graph) -> dict[str, Array]:
        """Returns inputs with special values, except grids: which element is read far outside an image is undefined."""
        return {k: v if k != "grid" else random_inputs(g)[k] for k, v in random_inputs(g, 2, special=0.05).items()}

    made = executables(graphs({**COMPOSITES, **CALLS}, dtype))
    are_right(made, inputs=lambda g: random_inputs(g, 2))
    are_right(made, inputs=inputs)


# ---- what the nodes alone would hide


@means(meanings.einsum)
def _narrow_sums(self: fg.Graph, equation: str, a: fg.Tensor, b: fg.Tensor) -> fg.Tensor:
    """Computes ij,jk->k with sums over the first operand in its own dtype."""
    return self.reshape(self.reshape(self.reduction(a, "add", 0), (1, -1)) @ b, (-1,))


def test_a_sum_that_overflows_between_nodes_is_wrong() -> None:
    g = fg.Graph("narrow")
    a, b = g.tensor("a", (4000, 2), "float16"), g.tensor("b", (2, 3), "float32")
    inputs = {"a": np.full((4000, 2), 20, np.float16), "b": np.full((2, 3), 1e-3, np.float32)}
    g.output(_narrow_sums(g, "ij,jk->k", a, b), name="y")
    result = check(g, "cpu", inputs)
    assert result.outputs[0].wrong == 3
    assert "reference np.float64(160" in result.outputs[0].worst
    right = fg.Graph("right")
    a, b = right.tensor("a", (4000, 2), "float16"), right.tensor("b", (2, 3), "float32")
    right.output(right.einsum("ij,jk->k", a, b), name="y")
    assert check(right, "cpu", inputs).ok
    assert check(right, "cpu", inputs).outputs[0].undecided == 0


def _plain(write: Any, x: Any, axis: int) -> Any:
    e = write("exp", "e", x)
    return write("div", "", e, write("reduction", "sum", e, mode="add", axes=(axis,)))


@pytest.mark.parametrize("wrong", [_plain, lambda write, x, axis: _plain(write, x, 0)], ids=["overflows", "other axis"])
def test_a_composite_written_out_wrongly_is_wrong(wrong: Any) -> None:
    op = TABLE["softmax"]
    right = op.expand
    g = fg.Graph("softmax")
    g.output(g.softmax(g.tensor("x", (4, 5))), name="y")
    x = np.array([[100.0, 0, 1, 2, 3]] * 4, np.float32)
    assert check(g, "cpu", {"x": x}).ok
    try:
        object.__setattr__(op, "expand", wrong)
        assert check(g, "cpu", {"x": x}).outputs[0].wrong
    finally:
        object.__setattr__(op, "expand", right)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "int32"])
def test_einsum_computes_in_the_dtype_of_its_result(dtype: str) -> None:
    """No product or sum on the way is narrower than the result of mixed operands, whatever their order."""
    for other in ("float32", "int32", "float64"):
        for first, second in ((dtype, other), (other, dtype)):
            for equation in ("ij,jk->k", "ij,jk->ik", "ij,ij->ij", "ij,kj->"):
                g = fg.Graph("e")
                a, b = g.tensor("a", (3, 3), first), g.tensor("b", (3, 3), second)
                y = g.einsum(equation, a, b)
                for node in g.nodes:
                    if node.op.name in ("mul", "matmul", "reduction"):
                        assert node.output.dtype == y.dtype, (equation, first, second, node)


def test_calls_within_calls_are_part_of_them() -> None:
    g = fg.Graph("g")
    y = g.gather_nd(g.tensor("x", (3, 4)), g.tensor("i", (2, 1), "int32"))
    z = g.tril(g.tril(y))
    assert {t: call.name for t, call in g.calls.items()} == {
        y: "gather_nd",
        z: "tril",
        z.graph.producer(z).inputs[0]: "tril",
    }  # type: ignore[union-attr]
    assert g.einsum("ij->ij", y) is not y
