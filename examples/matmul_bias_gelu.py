"""gelu(x @ w + bias), the first half of a transformer's MLP, as one float16 kernel with float32 accumulation.

fusegraph run examples/matmul_bias_gelu.py --check
python examples/matmul_bias_gelu.py
"""

import fusegraph as fg
from fusegraph.report.check import check_executable

TOKENS, FEATURES, HIDDEN = 256, 512, 1024

graph = fg.Graph("matmul_bias_gelu", io_dtype="float16")
x = graph.tensor("x", (TOKENS, FEATURES))
w = graph.tensor("w", (FEATURES, HIDDEN))
bias = graph.tensor("bias", (HIDDEN,))
graph.output(graph.gelu(x @ w + bias), name="y")


def main() -> None:
    executable = graph.compile()
    (kernel,) = executable.plan.kernels
    print(f"kernel {kernel.name}: " + ", ".join(node.op.name for node in kernel.group.nodes))
    unfused = graph.compile(fusion=False)
    print(f"without fusion: {len(unfused.plan.kernels)} kernels and {unfused.workspace_bytes:,} bytes of intermediates")
    print(check_executable(executable))


if __name__ == "__main__":
    main()
