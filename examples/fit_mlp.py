"""A small MLP learns which of two spirals a point is on: forward, loss, gradients and update are one graph.

fusegraph run examples/fit_mlp.py --check
python examples/fit_mlp.py
"""

import numpy as np

import fusegraph as fg

POINTS, HIDDEN, RATE, STEPS = 256, 64, 0.3, 600

graph = fg.Graph("fit_mlp")
points = graph.tensor("points", (POINTS, 2))
label = graph.tensor("label", (POINTS, 1))  # 0 or 1
sizes = {"w1": (2, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, HIDDEN), "b2": (HIDDEN,), "w3": (HIDDEN, 1), "b3": (1,)}
weights = {name: graph.tensor(name, shape) for name, shape in sizes.items()}
w1, b1, w2, b2, w3, b3 = weights.values()

hidden = graph.tanh(graph.tanh(points @ w1 + b1) @ w2 + b2)
logit = hidden @ w3 + b3
loss = graph.reduction(graph.softplus(logit) - logit * label, "avg", keepdims=False)  # cross entropy of a sigmoid
graph.output(loss, name="loss")
for weight, gradient in zip(weights.values(), graph.gradients(loss, list(weights.values()))):
    graph.assign(weight, weight - gradient * RATE)  # in the weight's memory, when the graph runs


def spirals() -> tuple[np.ndarray, np.ndarray]:
    """Returns points on two spirals, and on which of them each is."""
    label = np.arange(POINTS) % 2
    radius = np.linspace(0.1, 1, POINTS)
    angle = 2 * np.pi * radius + np.pi * label
    where = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return where.astype(np.float32), label[:, None].astype(np.float32)


def main() -> None:
    rng = np.random.default_rng(0)
    values = {
        name: (rng.standard_normal(shape) * (2 / shape[0]) ** 0.5 if len(shape) == 2 else np.zeros(shape))
        for name, shape in sizes.items()
    }
    arrays = {name: value.astype(np.float32) for name, value in values.items()}
    where, which = spirals()
    step = graph.compile("cpu")
    print(f"{len(step.plan.kernels)} kernels a step")
    for number in range(STEPS):
        loss = step(where, which, **arrays)
        if number % 150 == 0 or number == STEPS - 1:
            print(f"step {number:5}  loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
