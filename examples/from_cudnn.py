"""A graph written for cuDNN's Python API, which cuDNN 9 refuses, run by adding one line.

Batch norm's scale and bias and a relu stand in front of a convolution.  cuDNN makes no plan for that; here it is one
kernel, or two where that is faster.  Needs NVIDIA's cudnn-frontend: pip install 'fusegraph[cudnn]'

    python examples/from_cudnn.py
    fusegraph explain examples/from_cudnn.py
"""

import cudnn
import numpy as np

import fusegraph as fg

X, SCALE, BIAS, W, Y = range(1, 6)  # uids


def refused(images: int, channels: int, size: int) -> cudnn.pygraph:
    """Returns conv(relu(x * scale + bias), w) in half precision, NHWC."""
    pygraph = cudnn.pygraph(
        name="scale_bias_relu_conv",
        io_data_type=cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    nhwc = [size * size * channels, 1, size * channels, channels]
    x = pygraph.tensor([images, channels, size, size], nhwc, name="x", uid=X)
    scale = pygraph.tensor([1, channels, 1, 1], [channels, 1, channels, channels], name="scale", uid=SCALE)
    bias = pygraph.tensor([1, channels, 1, 1], [channels, 1, channels, channels], name="bias", uid=BIAS)
    w = pygraph.tensor([channels, channels, 3, 3], [9 * channels, 1, 3 * channels, channels], name="w", uid=W)
    scaled = pygraph.add(pygraph.mul(x, scale), bias)
    hidden = pygraph.relu(scaled, name="hidden").set_data_type(cudnn.data_type.HALF)
    y = pygraph.conv_fprop(hidden, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv")
    y.set_output(True).set_name("y").set_uid(Y)
    return pygraph


graph = fg.from_cudnn(refused(images=1, channels=64, size=28))


def main() -> None:
    pygraph = refused(images=1, channels=64, size=28)
    pygraph = fg.from_cudnn(pygraph)  # the line that was added
    pygraph.validate()
    pygraph.build_operation_graph()
    pygraph.create_execution_plans([cudnn.heur_mode.A])
    pygraph.check_support()
    pygraph.build_plans()

    on_gpu = pygraph.build().device.is_cuda
    random = np.random.default_rng(0)
    arrays = {}
    for uid in (X, SCALE, BIAS, W, Y):
        tensor = pygraph.uids[uid]
        values = random.standard_normal(tensor.size).astype(np.float16)  # as it lies in memory
        arrays[uid] = fg.to_device(values) if on_gpu else values
    pygraph.execute(arrays)

    kernels = pygraph.build().plan.kernels
    for kernel in kernels:
        print(f"kernel {kernel.name}: " + ", ".join(node.op.name for node in kernel.group.nodes))
    y = fg.to_numpy(arrays[Y]).astype(np.float32)
    print(f"y: {y.size} elements from {y.min():.1f} to {y.max():.1f} on the {'GPU' if on_gpu else 'CPU'}")


if __name__ == "__main__":
    main()
