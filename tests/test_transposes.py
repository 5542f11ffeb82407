"""What follows the transpose of a product is computed in front of it, by the product's kernel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegraph as fg
from fusegraph.passes.transposes import move_transposes
from fusegraph.plan import plan

RNG = np.random.default_rng(3)
LAST = (96, 1, 12, 3)  # strides of [2, 3, 8, 4] with its channels last


def _block(residual=LAST, perm=(0, 3, 1, 2)):
    """residual + scale * transpose(x @ w), as in a network that keeps its channels first."""
    graph = fg.Graph("block")
    x, w = graph.tensor("x", (2, 8, 4, 5)), graph.tensor("w", (5, 3))
    scale, beside = graph.tensor("scale", (3, 1, 1)), graph.tensor("beside", (2, 3, 8, 4), strides=residual)
    y = graph.transpose(graph.matmul(x, w), perm)
    graph.output(graph.relu(graph.add(graph.mul(y, scale), beside)), strides=residual)
    return graph


def _run(graph, engine):
    fed = {}
    for t in graph.inputs:
        order = sorted(range(t.rank), key=lambda d: -t.strides[d])
        lies = np.random.default_rng(len(t.name)).standard_normal([t.shape[d] for d in order]).astype(np.float32)
        fed[t.name] = lies.transpose(np.argsort(order))
    found = fg.compile(graph, engine=engine)(**fed)
    return [np.asarray(y) for y in (found if isinstance(found, tuple) else (found,))]


def test_an_epilogue_behind_a_transpose_is_part_of_the_product():
    assert len(plan(_block()).kernels) == 1
    np.testing.assert_allclose(_run(_block(), "cpu")[0], _run(_block(), "reference")[0], rtol=1e-5, atol=1e-5)


def test_operands_that_lie_otherwise_stay_behind_it():
    """Channels first, the other operand would be read one element here and one there."""
    graph = _block(residual=None)
    assert [n.op.name for n in move_transposes(graph).graph.nodes if n.output.shape == (2, 8, 4, 3)].count("add") == 0
    np.testing.assert_allclose(_run(graph, "cpu")[0], _run(graph, "reference")[0], rtol=1e-5, atol=1e-5)


def test_norms_read_the_transpose_as_a_view():
    graph = fg.Graph("norm")
    x, w = graph.tensor("x", (2, 6, 5)), graph.tensor("w", (5, 7))
    y = graph.transpose(graph.matmul(x, w), (0, 2, 1))
    graph.output(graph.softmax(graph.mul(y, 2.0), axis=2))
    assert not next(step for step in plan(graph).steps if step.name == "transposes").changed


def test_a_transpose_that_is_a_result_stays_one():
    graph = fg.Graph("result")
    x, w = graph.tensor("x", (6, 5)), graph.tensor("w", (5, 7))
    y = graph.output(graph.transpose(graph.matmul(x, w), (1, 0)))
    graph.output(graph.relu(y))
    assert move_transposes(graph).graph is graph


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_chains(data):
    """Any chain of pointwise nodes behind transposes, with operands of any rank, in any layout."""
    graph = fg.Graph("chain")
    shape = (2, 3, 4)
    perm = tuple(data.draw(st.permutations(range(3))))
    inner = [0, 0, 0]
    for d, p in enumerate(perm):
        inner[p] = shape[d]
    x, w = graph.tensor("x", (*inner[:2], 5)), graph.tensor("w", (5, inner[2]))
    product = graph.matmul(x, w)
    tensors = [graph.transpose(product, perm)]
    for step in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["relu", "add", "mul", "scale", "both", "sum"]))
        y = data.draw(st.sampled_from(tensors))
        if kind == "relu":
            made = graph.relu(y)
        elif kind == "both":
            made = graph.add(y, data.draw(st.sampled_from(tensors)))
        elif kind == "sum":
            made = graph.sub(y, graph.reduction(y, mode="avg", axes=(1,)))
        else:
            own = tuple(data.draw(st.sampled_from([1, n])) for n in shape[data.draw(st.integers(0, 2)) :])
            own = shape if kind == "add" else own
            order = data.draw(st.permutations(range(len(own))))
            strides, size = [0] * len(own), 1
            for d in reversed(order):
                strides[d], size = size, size * own[d]
            made = (graph.mul if kind == "scale" else graph.add)(y, graph.tensor(f"t{step}", own, strides=strides))
        tensors.append(made)
    for y in tensors[1:]:
        if y is tensors[-1] or data.draw(st.booleans()):
            graph.output(y)
    for got, expected in zip(_run(graph, "cpu"), _run(graph, "reference")):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("perm", [(0, 3, 1, 2)])
def test_the_pass_moves_all_of_the_chain(perm):
    graph = move_transposes(_block(perm=perm)).graph
    moved = [n.op.name for n in graph.nodes if n.output.shape == (2, 8, 4, 3)]
    assert moved == ["matmul", "mul", "transpose", "add", "relu"]
