"""A ResNet trained by torch, compiled by fusegraph, beside torch's eager mode and its own compiler, inductor.

    python examples/train_resnet.py                      a small network, on the GPU if there is one
    python examples/train_resnet.py --model resnet50     one of torchvision's (pip install torchvision)
    python examples/train_resnet.py --engines eager,fusegraph --steps 5 --batch 4 --pixels 16

The images are synthetic: noise with a bright bar, whose direction is to be told.  A step is forward, loss, backward
and the optimiser, in bfloat16 on a GPU.  Needs  pip install torch
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

ENGINES = ("eager", "inductor", "fusegraph")
CLASSES = 4


class Block(nn.Module):
    """Two convolutions with batch norms, and what came in added to the result."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def small_resnet(width: int = 16, blocks: int = 3) -> nn.Module:
    """Returns a network for images of 3 channels, each block of which has twice the channels of the one before."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *(Block(width << max(0, k - 1), width << k, min(k + 1, 2)) for k in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width << (blocks - 1), CLASSES),
    )


def network(name: str) -> nn.Module:
    """Returns the network of a name, always with the same weights."""
    torch.manual_seed(0)
    if name == "small":
        return small_resnet()
    try:
        from torchvision import models
    except ImportError:
        sys.exit(f"{name!r} is one of torchvision's models, which is missing: pip install torchvision")
    if not hasattr(models, name):
        sys.exit(f"torchvision has no model {name!r}")
    model: nn.Module = getattr(models, name)(num_classes=CLASSES)
    return model


def images(batch: int, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images (batch, 3, pixels, pixels), and the direction of the bar in each."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.5 * torch.randn(batch, 3, pixels, pixels, generator=generator)
    which = torch.randint(CLASSES, (batch,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(pixels), torch.arange(pixels), indexing="ij")
    along = torch.stack([rows - pixels // 2, columns - pixels // 2, rows - columns, rows + columns - pixels + 1])
    return noise + 2.0 * (along.abs() <= pixels // 16)[which][:, None], which


def training(engine: str, told: argparse.Namespace, device: str) -> Callable[[], torch.Tensor]:
    """Returns a function that does a step of training on an engine, and returns the loss."""
    model = network(told.model).to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=told.rate, momentum=0.9)
    x, y = images(told.batch, told.pixels)
    x, y = x.to(device, memory_format=torch.channels_last), y.to(device)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return F.cross_entropy(model(x), y)

    compiled = loss_of if engine == "eager" else torch.compile(loss_of, backend=engine)

    def step() -> torch.Tensor:
        loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def outside() -> int:
    """Returns how many bytes of the GPU are taken, but not by torch."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measured(engine: str, told: argparse.Namespace, device: str) -> str:
    """Trains a network on an engine; returns a line of a table."""
    torch.compiler.reset()
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = outside()
    start = time.perf_counter()
    step = training(engine, told, device)
    losses = [float(step())]  # waits for the GPU
    ready = time.perf_counter() - start
    losses += [float(step()) for _ in range(2)]
    start = time.perf_counter()
    found = [step() for _ in range(told.steps - 3)]
    losses += [float(loss) for loss in found]
    rate = told.batch * len(found) / (time.perf_counter() - start)
    memory = "-"
    if device == "cuda":
        memory = f"{(torch.cuda.max_memory_allocated() + max(0, outside() - before)) / 1e6:,.0f} MB"
    return f"{engine:10}{rate:12,.1f}{losses[0]:12.4f}{losses[-1]:12.4f}{memory:>14}{ready:10.1f} s"


def main(argv: list[str]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large, engines = device == "cuda", ENGINES if device == "cuda" else ("eager", "fusegraph")
    parser = argparse.ArgumentParser(description="Trains a ResNet on several engines.")
    parser.add_argument("--model", default="small", help="small, or a name in torchvision.models")
    parser.add_argument("--engines", default=",".join(engines), help=f"of {', '.join(ENGINES)}; default: %(default)s")
    parser.add_argument("--batch", type=int, default=128 if large else 4)
    parser.add_argument("--pixels", type=int, default=224 if large else 16, help="of a side of the images")
    parser.add_argument("--steps", type=int, default=100 if large else 8, help="at least 4")
    parser.add_argument("--rate", type=float, default=0.05, help="of learning")
    told = parser.parse_args(argv)
    if told.steps < 4 or not set(told.engines.split(",")) <= {*ENGINES}:
        parser.error(f"there are at least 4 steps, and the engines {', '.join(ENGINES)}")
    print(f"{told.model}, {told.batch} images of {told.pixels} x {told.pixels}, {device}\n")
    print(f"{'engine':10}{'images/s':>12}{'first loss':>12}{'last loss':>12}{'peak memory':>14}{'first step':>12}")
    for engine in told.engines.split(","):
        print(measured(engine, told, device), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
