"""Sharpens a photograph and inks its edges, on the 8-bit pixels as a picture file has them.

    python examples/image_filter.py                   the photograph of a cat that scikit-image ships
    python examples/image_filter.py PHOTO [FOLDER]    any picture file
    fusegraph run examples/image_filter.py --check

Writes before.png and after.png to FOLDER (default: fusegraph_out/image_filter).  Reading and writing pictures needs
Pillow, the cat scikit-image:  pip install pillow scikit-image
"""

import sys
from importlib import resources
from pathlib import Path

import numpy as np

import fusegraph as fg

BLUR = np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]) / 256  # binomial: close to a Gaussian with a variance of 1 pixel
SOBEL = np.outer([1, 2, 1], [-1, 0, 1]) / 8  # horizontal derivative, smoothed vertically
LUMA = np.array([0.299, 0.587, 0.114])  # brightness of red, green and blue (ITU-R BT.601)


def ink_filter(height: int, width: int, amount: float = 1.5, ink: float = 3.0) -> fg.Graph:
    """Returns an RGB picture (1, 3, height, width) of bytes, interleaved (NHWC): sharpened, with dark lines along
    its edges.

    amount is how much of the detail that a blur removes is added back, ink how dark lines become with the slope of the
    brightness.  The picture's outermost two pixels see a black frame.
    """
    graph = fg.Graph("ink_filter")
    picture = graph.tensor("picture", (1, 3, height, width), dtype="uint8", layout="NHWC")

    unsharp = -amount * BLUR
    unsharp[2, 2] += 1 + amount
    detail = np.stack([unsharp] * 3)[:, None].astype(np.float32)  # one filter a channel: (3, 1, 5, 5)
    sharp = graph.conv_fprop(picture, graph.constant(detail), padding=2, groups=3, name="sharp")

    slopes = []
    for name, taps in (("slope_x", SOBEL), ("slope_y", SOBEL.T)):
        taps = (LUMA[:, None, None] * taps)[None].astype(np.float32)  # brightness and derivative at once: (1, 3, 3, 3)
        slopes.append(graph.conv_fprop(picture, graph.constant(taps), padding=1, name=name))
    edge = graph.sqrt(slopes[0] * slopes[0] + slopes[1] * slopes[1], name="edge")

    paper = graph.clamp(1 - edge * (ink / 255), min=0.0, max=1.0, name="paper")
    graph.output(graph.round(sharp * paper), name="filtered", dtype="uint8", layout="NHWC")  # the cast saturates
    return graph


graph = ink_filter(300, 451)  # the size of the cat


def main(argv: list[str]) -> None:
    try:
        from PIL import Image
    except ImportError:
        sys.exit("image_filter.py reads and writes pictures with Pillow, which is missing: pip install pillow")
    if argv:
        source = Path(argv[0])
    else:
        try:
            source = Path(str(resources.files("skimage") / "data" / "chelsea.png"))
        except ImportError:
            sys.exit("give a picture file, or install the package with the cat: pip install scikit-image")
    folder = Path(argv[1] if len(argv) > 1 else "fusegraph_out/image_filter")

    try:
        with Image.open(source) as image:
            picture = np.ascontiguousarray(image.convert("RGB"))  # (H, W, 3)
    except OSError as error:
        sys.exit(f"{source} cannot be read as a picture: {error}")

    executable = ink_filter(*picture.shape[:2]).compile()
    pixels = picture.transpose(2, 0, 1)[None]  # the same memory seen as (1, 3, H, W)
    if executable.engine == "cuda":
        filtered = fg.to_numpy(executable(fg.to_device(pixels)))
    else:
        filtered = executable(pixels)

    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(folder / "before.png")
    Image.fromarray(np.ascontiguousarray(filtered[0].transpose(1, 2, 0))).save(folder / "after.png")
    print(f"{len(executable.plan.kernels)} kernels on {executable.engine}, before.png and after.png in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
