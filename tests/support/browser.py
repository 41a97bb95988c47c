"""A headless browser for tests of pages, where one is installed: Chromium, its driver, and selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _missing() -> str | None:
    """Return the missing program, or None if a browser can be started."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium is installed (Debian: apt-get install chromium chromium-driver)"
    if not shutil.which("chromedriver"):
        return "no chromedriver is installed (Debian: apt-get install chromium-driver)"
    return None


@contextmanager
def browser() -> Iterator[Chrome]:
    """Start the browser, and end it. Skips the test where a program is missing."""
    lacking = _missing()
    if lacking:
        pytest.skip(lacking)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(path for path in map(shutil.which, BROWSERS) if path)
    # Containers let it make no sandbox of its own; what it opens here is ours.
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()
