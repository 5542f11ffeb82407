"""sigmoid(a + b * c) as one kernel: three arrays are read, one is written, nothing in between touches memory.

fusegraph run examples/sigmoid_fma.py --check
python examples/sigmoid_fma.py
"""

import numpy as np

import fusegraph as fg

graph = fg.Graph("sigmoid_fma")
a, b, c = (graph.tensor(name, (512, 1024)) for name in "abc")
graph.output(graph.sigmoid(a + b * c), name="y")


def main() -> None:
    executable = graph.compile()  # for the GPU if there is one, else for the CPU
    print(executable.plan.kernels[0].source.code)

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((512, 1024), np.float32) for _ in "abc"]
    if executable.engine == "cuda":
        y = fg.to_numpy(executable(*map(fg.to_device, arrays)))
    else:
        y = executable(*arrays)

    expected = 1 / (1 + np.exp(-(arrays[0] + arrays[1] * arrays[2])))
    print(f"ran on {executable.engine}: largest difference from NumPy {np.abs(y - expected).max():.2g}")


if __name__ == "__main__":
    main()
