"""A residual block of two 3x3 convolutions, bfloat16, NHWC: two kernels for seven operations.

The first kernel is convolution + bias + relu, the second convolution + bias + residual + relu.  Each convolution's
result stays in registers until the relu has been applied.

    fusegraph run examples/conv_bias_relu.py --check
    fusegraph explain examples/conv_bias_relu.py
    python examples/conv_bias_relu.py
"""

import fusegraph as fg
from fusegraph.report.check import check_executable


def residual_block(images: int, channels: int, height: int, width: int) -> fg.Graph:
    """Returns relu(conv(relu(conv(x, w1) + b1), w2) + b2 + x)."""
    graph = fg.Graph("residual_block", io_dtype="bfloat16")
    shape = (
        images,
        channels,
        height,
        width,
    )  # logical order is always N, C, H, W; the layout says how it lies in memory
    x = graph.tensor("x", shape, layout="NHWC")
    w1, w2 = (graph.tensor(name, (channels, channels, 3, 3), layout="KRSC") for name in ("w1", "w2"))
    b1, b2 = (graph.tensor(name, (1, channels, 1, 1)) for name in ("b1", "b2"))

    hidden = graph.relu(graph.bias(graph.conv_fprop(x, w1, padding=1, name="conv1"), b1), name="hidden")
    graph.output(graph.relu(graph.bias(graph.conv_fprop(hidden, w2, padding=1, name="conv2"), b2) + x), name="y")
    return graph


graph = residual_block(images=1, channels=64, height=56, width=56)


def main() -> None:
    executable = graph.compile()
    for kernel in executable.plan.kernels:
        print(f"kernel {kernel.name}: " + ", ".join(node.op.name for node in kernel.group.nodes))
    for decision in executable.plan.partition.decisions:
        verdict = "fused" if decision.fused else "not fused"
        print(f"  {decision.producer} -> {decision.consumer}: {verdict}, {decision.reason}")
    print(check_executable(executable))


if __name__ == "__main__":
    main()
