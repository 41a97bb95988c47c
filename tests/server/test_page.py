"""The page at /: in a real browser, where there is one, while requests run; and what holds of its files anywhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import browser as browsers
import httpx
import pytest
from servers import Server

from phonograph.server.http.page import FILES, FOLDER

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

# Colours of the page in the light, in the order red, green, blue.
DECODE, PREFILL, WHOLE, NONE = (58, 110, 168), (201, 134, 34), (91, 138, 90), (184, 67, 47)
COUNT_PIXELS = """
const canvas = document.getElementById("picture");
const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const counts = arguments[0].map(() => 0);
for (let at = 0; at < data.length; at += 4) {
  const place = arguments[0].findIndex((colour) => colour.every((part, of) => data[at + of] === part));
  if (place >= 0) counts[place] += 1;
}
return counts;
"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with browsers.browser() as driver:
        yield driver


def look(chrome: Chrome, *, width: int = 1000, height: int = 1200, scheme: str = "light") -> None:
    """Before the page is opened."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def text(chrome: Chrome, name: str) -> str:
    return chrome.execute_script("return document.getElementById(arguments[0]).innerText", name)


def wait(chrome: Chrome, holds: Callable[[], Any], seconds: float = 15) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, chrome.execute_script("return document.body.innerText")
        time.sleep(0.05)


def run(server: Server, prompt: list[int], max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    assert server.post("/v1/completions", body).status_code == 200


def test_it_shows_steps_while_requests_run(chrome: Chrome, server: Server) -> None:
    look(chrome)
    body = {"prompt": [61] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        pieces = response.iter_raw()
        next(pieces)
        chrome.get(server.url)
        wait(chrome, lambda: text(chrome, "state") == "Live")
        wait(chrome, lambda: text(chrome, "running") == "1 of 4")
        wait(chrome, lambda: float(text(chrome, "output-rate").replace(",", "")) > 0)
        assert re.match(r"Step [\d,]+: 1 decode in full decode graph of 1 token, 1 slot", text(chrome, "chosen-what"))
        first = text(chrome, "list").splitlines()[0]
        wait(chrome, lambda: text(chrome, "list").splitlines()[0] != first)
    server.wait_until_idle()
    # A prompt that no graph holds, and one that a mixed graph pads.
    run(server, [62] * 20, 2)
    run(server, [63, 64, 65], 2)
    wait(chrome, lambda: text(chrome, "running") == "0 of 4" and "prefill of 3 tokens" in text(chrome, "list"))
    assert "20 tokens are more than the largest graph holds (16)" in text(chrome, "list")
    assert "full mixed graph of 4 tokens" in text(chrome, "list")
    assert "did not replay a whole graph" in text(chrome, "verdict")
    why = text(chrome, "decisions").splitlines()[0]
    assert why.startswith("no graph") and "more tokens than the largest graph holds" in why
    assert text(chrome, "mode") == "FULL" and "the default where support is ALWAYS" in text(chrome, "resolution")
    assert "7 graphs" in text(chrome, "graphs-summary") and "demo · cpu · reference" in text(chrome, "what")
    assert min(chrome.execute_script(COUNT_PIXELS, [DECODE, PREFILL, WHOLE, NONE])) > 20
    errors = [entry for entry in chrome.get_log("browser") if entry["level"] != "INFO"]  # pyright: ignore
    assert errors == []


def test_a_step_can_be_chosen_and_the_page_be_paused(chrome: Chrome, server: Server) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    look(chrome)
    run(server, [71] * 3, 4)
    server.wait_until_idle()
    newest = server.get("/v1/graphs").json()["num_steps"]
    chrome.get(server.url)
    wait(chrome, lambda: text(chrome, "chosen-what").startswith(f"Step {newest:,}:"))
    picture = chrome.find_element(By.ID, "picture")
    for _ in range(3):
        picture.send_keys(Keys.ARROW_LEFT)
    assert text(chrome, "chosen-what").startswith(f"Step {newest - 3:,}: 1 prefill of 3 tokens in full mixed graph")
    assert "1 of 4 tokens is padding" in text(chrome, "chosen-why")
    picture.send_keys(Keys.ESCAPE)
    assert text(chrome, "chosen-what").startswith(f"Step {newest:,}:")
    chrome.find_element(By.ID, "pause").click()
    run(server, [72], 3)
    time.sleep(0.7)
    assert text(chrome, "state") == "Paused" and text(chrome, "chosen-what").startswith(f"Step {newest:,}:")
    chrome.find_element(By.ID, "pause").click()
    wait(chrome, lambda: text(chrome, "chosen-what").startswith(f"Step {newest + 3:,}:"))


def points(chrome: Chrome, name: str) -> list[tuple[float, float]]:
    """Points of a tile's line."""
    found = "return document.querySelector(`#${arguments[0]} + svg polyline`).getAttribute('points')"
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in chrome.execute_script(found, name).split())]


def test_every_tile_has_a_value_and_a_line(chrome: Chrome, serve_with: Callable[..., Server]) -> None:
    server = serve_with()
    look(chrome)
    chrome.get(server.url)
    wait(chrome, lambda: text(chrome, "state") == "Live")
    before = server.get("/v1/graphs").json()["engine"]
    assert text(chrome, "errors") == "0, 0" and text(chrome, "first-token") == text(chrome, "inter-token") == "-"
    assert points(chrome, "first-token") == []
    assert server.post("/v1/completions", {"prompt": [1], "max_tokens": -1}).status_code == 400
    assert server.post("/v1/nothing", {}).status_code == 404
    body = {"prompt": [61] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        pieces = response.iter_raw()
        next(pieces)
        wait(chrome, lambda: text(chrome, "errors") == "2, 0" and text(chrome, "inter-token").endswith(" ms"))
    server.wait_until_idle()
    names = chrome.execute_script("return [...document.querySelectorAll('#tiles dd')].map((each) => each.id)")
    assert len(names) == 12
    for name in set(names) - {"prefix"}:
        assert text(chrome, name) not in ("", "-"), name
        assert all(0 <= x <= 60 and 0 <= y <= 16 for x, y in points(chrome, name)) and points(chrome, name), name
    shown = {
        name: float(re.findall(r"[\d.]+", text(chrome, name))[0]) / 1000 for name in ("first-token", "inter-token")
    }
    after = server.get("/v1/graphs").json()["engine"]
    assert after["first_token"]["count"] - before["first_token"]["count"] == 1
    first_token = after["first_token"]["seconds"] - before["first_token"]["seconds"]
    assert shown["first-token"] == pytest.approx(first_token, rel=0.06)
    assert 0 < shown["inter-token"] < after["inter_token"]["seconds"] - before["inter_token"]["seconds"]
    # The errors rose from the floor of their line to its top.
    assert points(chrome, "errors")[0][1] == 15 and points(chrome, "errors")[-1][1] == 1


def test_it_says_which_scales_are_linear(chrome: Chrome, server: Server) -> None:
    look(chrome)
    chrome.get(server.url)
    shown = chrome.execute_script("return document.body.innerText")
    assert "not linear but that of a square root" in shown and "All scales here are linear" in shown


def test_it_fits_a_phone_and_the_dark(chrome: Chrome, server: Server) -> None:
    run(server, [81] * 20, 2)
    look(chrome, width=360, height=740, scheme="dark")
    chrome.get(server.url)
    wait(chrome, lambda: "no graph" in text(chrome, "list"))
    assert chrome.execute_script("return document.documentElement.scrollWidth") <= 360
    colours = "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    background, ink = (sum(map(int, re.findall(r"\d+", each))) for each in chrome.execute_script(colours))
    assert background < 150 and ink > 600
    assert chrome.execute_script("return document.getElementById('pause').getBoundingClientRect().height") >= 30


def test_it_asks_for_the_key(chrome: Chrome, serve_with: Callable[..., Server]) -> None:
    from selenium.webdriver.common.by import By

    look(chrome)
    guarded = serve_with(api_key=["secret"])
    chrome.get(guarded.url)
    field = chrome.find_element(By.ID, "key-value")
    wait(chrome, field.is_displayed)
    assert text(chrome, "state") == "An API key is needed" and text(chrome, "mode") == "-"
    field.send_keys("secret\n")
    wait(chrome, lambda: text(chrome, "state") == "Live")
    assert not field.is_displayed() and text(chrome, "mode") == "FULL"


def test_files(serve_with: Callable[..., Server]) -> None:
    """They need no key, load nothing from elsewhere, and lead nowhere else."""
    guarded = serve_with(api_key=["secret"])
    assert set(FILES) == {"/", "/page/page.css", "/page/page.js", "/page/picture.js", "/page/tiles.js"}
    for url, name in FILES.items():
        answer = guarded.get(url)
        assert answer.status_code == 200 and answer.text == (FOLDER / name).read_text(encoding="utf-8")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        elsewhere = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", answer.text)
        assert [link for link in elsewhere if link != "http://www.w3.org"] == []
        assert not re.search(r"innerHTML|\bon\w+=|<style|style=", answer.text)
    for url in ("/v1/graphs", "/metrics", "/page/", "/page/index.html", "/page/..%2fapp.py", "/page/nothing"):
        assert guarded.get(url).status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert guarded.get("/v1/graphs", headers=headers).status_code == 200
    assert guarded.get("/page/..%2fapp.py", headers=headers).status_code == 404
