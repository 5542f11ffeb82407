"""conv2d as a plain function on torch, CuPy or NumPy arrays, next to the framework's own.

python examples/torch_style_conv2d.py                  with the first of torch, CuPy and NumPy that is installed
python examples/torch_style_conv2d.py numpy            with one of them
fusegraph run examples/torch_style_conv2d.py --check   the graph behind the function
"""

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fusegraph.functional import conv2d, conv2d_graph

X_SHAPE, W_SHAPE = (4, 64, 56, 56), (128, 64, 3, 3)
STRIDE, PADDING = 2, 1

graph = conv2d_graph(np.zeros(X_SHAPE, np.float32), np.zeros(W_SHAPE, np.float32), STRIDE, PADDING)


def from_numpy(framework: str, array: np.ndarray) -> Any:
    """Returns the array in a framework, on the GPU if there is one."""
    if framework == "numpy":
        return array
    module = importlib.import_module(framework)
    if framework == "cupy":
        return module.asarray(array)
    return module.from_numpy(array).to("cuda" if module.cuda.is_available() else "cpu")


def own_conv2d(framework: str) -> Callable[[Any, Any, int, int], Any]:
    """Returns the framework's own convolution: torch has one, NumPy and CuPy make it of windows and a tensor
    product.
    """
    if framework == "torch":
        torch = importlib.import_module("torch")
        torch.backends.cudnn.allow_tf32 = False  # products in float32, as fusegraph's
        return lambda x, w, stride, padding: torch.nn.functional.conv2d(x, w, stride=stride, padding=padding)
    xp = importlib.import_module(framework)

    def windows(x: Any, w: Any, stride: int, padding: int) -> Any:
        padded = xp.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        seen = xp.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
        return xp.tensordot(seen, w, axes=((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)

    return windows


def milliseconds(function: Callable[[], Any], wait: Callable[[], Any], calls: int = 5) -> float:
    """Returns time of one call, after a first one that is not counted."""
    function()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - start) / calls * 1e3


def main(argv: list[str]) -> None:
    installed = [name for name in ("torch", "cupy", "numpy") if importlib.util.find_spec(name)]
    framework = argv[0] if argv else installed[0]
    if framework not in installed:
        sys.exit(f"{framework!r} is not one of the frameworks installed here: {', '.join(installed)}")

    rng = np.random.default_rng(0)
    x, w = (from_numpy(framework, rng.standard_normal(shape, np.float32)) for shape in (X_SHAPE, W_SHAPE))
    own = own_conv2d(framework)
    on_gpu = framework == "cupy" or (framework == "torch" and x.is_cuda)
    wait = importlib.import_module(framework).cuda.Device().synchronize if framework == "cupy" else lambda: None
    if framework == "torch" and on_gpu:
        wait = importlib.import_module("torch").cuda.synchronize

    difference = float(abs(conv2d(x, w, STRIDE, PADDING) - own(x, w, STRIDE, PADDING)).max())
    print(f"x {X_SHAPE}, w {W_SHAPE}, float32, {framework} on the {'GPU' if on_gpu else 'CPU'}")
    print(f"largest difference          {difference:.2g}")
    print(f"fusegraph.functional.conv2d {milliseconds(lambda: conv2d(x, w, STRIDE, PADDING), wait):8.3f} ms")
    print(f"{framework + ' itself':27} {milliseconds(lambda: own(x, w, STRIDE, PADDING), wait):8.3f} ms")
    if not on_gpu:
        print("(without a GPU fusegraph steps through the CUDA kernel thread by thread: to check it, not for speed)")


if __name__ == "__main__":
    main(sys.argv[1:])
