"""An ONNX model, a small convolutional network with random weights: loaded, compiled, compared with onnx.reference.

python examples/onnx_model.py
fusegraph run examples/onnx_model.py --check

A model in a file works the same without any Python:  fusegraph explain model.onnx:batch=8
Needs the package onnx:  pip install onnx
"""

import tempfile
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import fusegraph as fg


def network() -> ModelProto:
    """Returns images (batch, 3, 16, 16) to probabilities (batch, 10)."""
    rng = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(rng.normal(0, 0.2, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["image", "conv.weight"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["conv", "scale", "bias", "mean", "variance"], ["normal"]),
        helper.make_node("Relu", ["normal"], ["relu"]),
        helper.make_node("MaxPool", ["relu"], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["pooled"], ["average"]),
        helper.make_node("Flatten", ["average"], ["features"]),
        helper.make_node("Gemm", ["features", "dense.weight", "dense.bias"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["probability"]),
    ]
    variance = numpy_helper.from_array(rng.uniform(0.5, 2, 16).astype(np.float32), "variance")
    initializers = [weights("conv.weight", 16, 3, 3, 3), *(weights(name, 16) for name in ("scale", "bias", "mean"))]
    initializers += [variance, weights("dense.weight", 10, 16), weights("dense.bias", 10)]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 16, 16])
    probability = helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "network", [image], [probability], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


graph = fg.onnx.from_proto(network(), shapes={"batch": 4}).graph


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        path.write_bytes(network().SerializeToString())
        model = fg.onnx.load(path, shapes={"batch": 4})
    executable = model.compile()  # for the GPU if there is one, else for the CPU
    images = np.random.default_rng(1).normal(size=(4, 3, 16, 16)).astype(np.float32)
    if executable.engine == "cuda":
        probability = fg.to_numpy(executable(fg.to_device(images)))
    else:
        probability = executable(images)

    (expected,) = ReferenceEvaluator(network()).run(None, {"image": images})
    difference = np.abs(probability - expected).max()
    print(f"{len(network().graph.node)} nodes of the model, {len(executable.plan.kernels)} kernels")
    print(f"ran on {executable.engine}: largest difference from onnx.reference {difference:.2g}")


if __name__ == "__main__":
    main()
