"""A browser for tests of pages, and for their screenshots: Chromium without a window, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str:
    """Returns what a browser's test lacks on this machine; "" if nothing."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    lacks = [] if any(map(shutil.which, _BROWSERS)) else ["chromium"]
    lacks += [] if shutil.which("chromedriver") else ["chromium-driver"]
    return f"there is no browser to be driven: apt-get install {' '.join(lacks)}" if lacks else ""


@contextmanager
def browser(*, width: int = 1480, height: int = 940, scale: float = 1) -> Iterator[Any]:
    """Gives a driver of a browser whose window has this size."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--window-size={width},{height}")
    options.add_argument(f"--force-device-scale-factor={scale}")
    options.binary_location = next(filter(None, map(shutil.which, _BROWSERS)))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def opened(driver: Any, page: Path) -> None:
    """Opens a page from disk and waits until its graph is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(page.as_uri())
    WebDriverWait(driver, 20).until(
        lambda d: d.execute_script("return document.querySelectorAll('.card, .empty').length > 0")
    )
