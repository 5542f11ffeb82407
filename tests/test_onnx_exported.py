"""Networks as torch exports them to ONNX, of several operator sets, compute what torch does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402

import fusegraph as fg  # noqa: E402
from benchmarks import torch_models as models  # noqa: E402
from fusegraph.plan import plan  # noqa: E402

nn = torch.nn
_BLOCKS = ((3, 16, 16, False, False, 1), (5, 72, 24, True, True, 2))


def _others() -> Any:
    layers = [nn.ConvTranspose2d(3, 4, 3, 2, 1), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), nn.GroupNorm(2, 4)]
    layers += [nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(3, 2, 1), nn.Flatten(), nn.Softmax(-1)]
    return nn.Sequential(*layers)


#: A network, its input, the operator set, and how many kernels it is.
EXPORTED: dict[str, tuple[Callable[[], Any], tuple[int, ...], int, int]] = {
    "ResNet, 13": (lambda: models.ResNet((1, 1), 8, 10), (2, 3, 32, 32), 13, 12),
    "MobileNetV3, 13": (lambda: models.MobileNetV3(_BLOCKS, 32, 10), (2, 3, 32, 32), 13, 13),
    "others, 13": (_others, (2, 3, 7, 9), 13, 6),
    "GPT-2 block, 14": (lambda: models.gpt2_block(48, 3), (2, 17, 48), 14, 7),
    "ViT block, 18": (lambda: models.vit_block(48, 3), (2, 17, 48), 18, 7),
    "ResNet, 20": (lambda: models.ResNet((1, 1), 8, 10), (2, 3, 32, 32), 20, 12),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPORTED)
def test_exported_networks(case: str, tmp_path: Path) -> None:
    make, shape, opset, count = EXPORTED[case]
    torch.manual_seed(0)
    network, x, file = make().eval(), torch.randn(shape), tmp_path / "network.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this way to export is the one that needs no other package, but not the newest
        sizes = {"x": {0: "batch"}}
        torch.onnx.export(network, (x,), file, dynamo=False, opset_version=opset, input_names=["x"], dynamic_axes=sizes)
    model = fg.onnx.load(file, shapes={"batch": 2})
    with torch.no_grad():
        expected = network(x).numpy()
    np.testing.assert_allclose(model.compile("reference")(x.numpy()), expected, rtol=1e-4, atol=1e-5)
    kernels = plan(model.graph).kernels
    assert len(kernels) == count, [k.name for k in kernels]
