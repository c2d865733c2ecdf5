"""Pictures of the playground for the docs: `python docs/screenshots.py`. Needs Chromium and the extra dev."""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect, sync_playwright

IMAGES = Path(__file__).parent / "images"
ADDRESS = "http://127.0.0.1:8037"
ALONE = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]


def points(page: Page) -> None:
    """All four orders of a set, compared."""
    page.fill("#speed", "80")
    page.click("#play")
    expect(page.locator("#count")).to_have_text("256", timeout=60_000)
    page.click("#compare")
    expect(page.locator("#ends tbody tr")).to_have_count(5, timeout=60_000)


def pictures(page: Page) -> None:
    """A picture of which some two hundred pixels are known."""
    page.click("#tab-pictures")
    page.fill("#pixel-speed", "40")
    page.click("#stream-pixels")
    expect(page.locator("#known")).to_have_text(re.compile(r"^2\d\d$"), timeout=60_000)
    page.click("#stream-pixels")
    page.wait_for_timeout(500)


def events(page: Page) -> None:
    """A window over events of the past, after a larger incident."""
    page.click("#tab-events")
    page.fill("#event-speed", "100")
    page.click("#stream-events")
    expect(page.locator("#until-text")).to_have_text("100 to 120 s", timeout=60_000)
    page.fill("#length", "15")
    page.fill("#until", "118")
    expect(page.locator("#subtracted-attention")).to_have_text(re.compile("^refused"))
    expect(page.locator("#slid")).to_have_text(re.compile("^the same"))


def main() -> None:
    """Start a server, visit it, take the pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        command = [sys.executable, "-m", "setstream.cli", "serve", "--states", f"{folder}/states.db", "--port", ADDRESS[-4:]]
        server = subprocess.Popen([*command, "--log-level", "error"])
        try:
            for _ in range(100):
                try:
                    httpx.get(f"{ADDRESS}/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=ALONE)
            for name, act, scheme, width in (
                ("playground-points", points, "light", 1200),
                ("playground-pictures", pictures, "dark", 1000),
                ("playground-events", events, "light", 1200),
            ):
                page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                page.goto(ADDRESS)
                page.wait_for_selector("body[data-ready]")
                act(page)
                page.screenshot(path=IMAGES / f"{name}.png", full_page=True)
                print(IMAGES / f"{name}.png")
            browser.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
