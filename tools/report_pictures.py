"""Draws the pictures of docs/report.md and README.md: pages of a transformer, in a browser (tests/report_browser.py).

python tools/report_pictures.py [FOLDER]    writes report.png and report-dark.png, by default into docs
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from report_browser import browser, missing, opened  # noqa: E402


def page(folder: Path) -> Path:
    """Writes the page of twelve layers of torch's transformer, planned for an H200."""
    import torch

    import fusegraph.torch

    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 12, torch.nn.LayerNorm(768), enable_nested_tensor=False)
    model = model.eval().bfloat16().requires_grad_(False)
    report = fusegraph.torch.explain(model, torch.zeros(16, 512, 768, dtype=torch.bfloat16), target="h200")
    return report.save(folder / "page.html")


def draw(driver: Any, path: Path, *steps: str) -> None:
    """Runs steps in JavaScript, and writes what the window shows then."""
    for step in steps:
        driver.execute_script(step)
    driver.execute_async_script("setTimeout(arguments[0], 500)")
    driver.save_screenshot(str(path))
    print(path)


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, browser(width=1480, height=960) as driver:
        opened(driver, page(Path(scratch)))
        scroll = "document.querySelector('svg.graph').dispatchEvent(new WheelEvent('wheel', {deltaY: 560}))"
        draw(driver, folder / "report.png", scroll)
        click = "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        for selector in ("#theme", "[data-kernel='4'] .row:nth-of-type(2)", ".jump button:last-child"):
            driver.execute_script(click, selector)
        draw(
            driver, folder / "report-dark.png", "[...document.querySelectorAll('.line.marked')].at(-1).scrollIntoView()"
        )


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
