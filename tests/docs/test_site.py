"""Every page of the documentation site in Chromium: on a desktop and a phone, in the light and in the dark.

The screenshots are in `build/site-screenshots`; CI keeps them.
"""

from __future__ import annotations

import base64
import html
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import browser as browsers
import pytest

from phonograph.cli.options import ENGINE_FIELDS, SERVER_FIELDS

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "site-screenshots"
WIDTHS = {"desktop": 1366, "phone": 390}
Views = Sequence[tuple[str, str]]
VIEWS = (("desktop", "light"), ("phone", "dark"))
SETTLES, DRAWS = 2.0, 10.0
"""Seconds that a page has to follow a new size, and to draw its diagrams."""
# Mermaid draws into closed shadow roots, into which a test cannot look.
OPEN_ROOTS = """
const attach = Element.prototype.attachShadow;
Element.prototype.attachShadow = function (options) { return attach.call(this, {...options, mode: "open"}); };
"""
SEARCHES = {
    "--enforce-eager": "reference/settings",
    "enforce_eager": "reference/settings",
    "--input-len": "reference/commands",
    "install": "start",
    "offline": "start",
    "openai": "start",
    "curl": "start",
    "gguf": "guides/weights",
    "grammar": "guides/structured-output",
    "out of memory": "guides/troubleshooting",
    "nginx": "guides/deployment",
    "api key": "guides/deployment",
    "--max-model-len": "reference/settings",
    "lora": "features",
    "slot": "glossary",
}
"""Words, and a page that is among the first five results."""
TASKS = {
    "offline inference": "llm.generate([",
    "chat": "phonograph chat demo",
    "serving": "phonograph serve demo",
    "chat completions": "reference/endpoints/",
    "curl": "start/#serve-the-openai-api",
    "openai client": "start/#serve-the-openai-api",
    "streaming": "llm.stream(",
    "sampling parameters": "reference/api/sampling/",
    "temperature": "temperature=0",
    "logprobs": "SamplingParams(logprobs=2)",
    "json schema": "StructuredOutputs(json=...)",
    "structured output": "guides/structured-output/",
    "tool calling": "guides/structured-output/",
    "quantized gguf": "phonograph chat MODEL.gguf",
    "context length": "--max-model-len 8192",
    "threads": "OMP_NUM_THREADS=4",
    "api key": "--api-key SECRET",
    "benchmark": "phonograph bench latency demo",
    "embeddings": 'convert="embed"',
    "multiple gpus": "the GPUs of one host",
}
"""Tasks of the quickstarts of vLLM and llama.cpp: words, and what the page of tasks has for them."""
FAULTS = """
const found = new Set(), wide = document.documentElement.clientWidth, boxes = new Map();
const box = (element) => {
  if (!boxes.has(element)) {
    const clips = getComputedStyle(element).overflowX !== "visible";
    boxes.set(element, clips ? element.getBoundingClientRect() : null);
  }
  return boxes.get(element);
};
if (document.documentElement.scrollWidth > wide) found.add("the page scrolls sideways");
for (const image of document.images) {
  if (!image.complete || !image.naturalWidth) found.add(`no picture: ${image.src}`);
}
for (const {name} of performance.getEntriesByType("resource")) {
  if (!name.startsWith(location.origin) && !name.startsWith("data:")) found.add(`fetched from elsewhere: ${name}`);
}
for (const host of document.querySelectorAll(".mermaid")) {
  const drawn = host.shadowRoot?.querySelector("svg");
  if (!drawn) { found.add(`no diagram: ${host.textContent.slice(0, 60)}`); continue; }
  if (drawn.matches("[aria-roledescription=error]")) found.add("a diagram with an error");
  const {right, width} = drawn.getBoundingClientRect();
  if (right > wide + 1) found.add("a diagram is cut");
  const scale = width / drawn.viewBox.baseVal.width;
  if (scale < (wide < 500 ? 0.45 : 0.65)) found.add(`a diagram is drawn at ${scale.toFixed(2)} of its size`);
  for (const label of host.shadowRoot.querySelectorAll("foreignObject")) {
    if (label.firstElementChild?.scrollWidth > label.clientWidth + 2) found.add(`cut: ${label.textContent.trim()}`);
  }
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const drawer = wide < 1220 ? ", .md-sidebar--primary" : "";
const skipped = `.md-search, .md-skip, .headerlink, script, style, noscript${drawer}`;
while (walker.nextNode()) {
  const node = walker.currentNode, parent = node.parentElement;
  if (!node.data.trim() || parent.closest(skipped)) continue;
  if (!parent.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const rect of range.getClientRects()) {
    if (rect.width < 1) continue;
    let cut = rect.right > wide + 1 || rect.left < -1;
    for (let each = parent; each && !cut; each = each.parentElement) {
      const clip = box(each);
      cut = clip && (rect.right > clip.right + 1 || rect.left < clip.left - 1);
    }
    if (cut) found.add(`cut: ${node.data.trim().slice(0, 60)}`);
  }
}
return [...found];
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder; yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as address:
        yield address


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with browsers.browser() as driver:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": OPEN_ROOTS})
        yield driver


def look(chrome: Chrome, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def wait_for_diagrams(chrome: Chrome) -> None:
    """Wait until no source of a diagram is left. `FAULTS` reports what is left after `DRAWS`."""
    until = time.monotonic() + DRAWS
    while chrome.execute_script("return document.querySelectorAll('pre.mermaid').length") and time.monotonic() < until:
        time.sleep(0.02)


def has_colours(chrome: Chrome, scheme: str) -> bool:
    """Wait for the page to follow the system's scheme, `SETTLES` at most."""
    until = time.monotonic() + SETTLES
    while chrome.execute_script("return document.body.dataset.mdColorScheme") != scheme:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def lasting_faults(chrome: Chrome) -> list[str]:
    """Return the faults that are still there after the page has had time to follow a new size."""
    until = time.monotonic() + SETTLES
    while (faults := chrome.execute_script(FAULTS)) and time.monotonic() < until:
        time.sleep(0.1)
    return faults


def faults_of(chrome: Chrome, url: str, name: str, views: Views = VIEWS, pictures: Path = SCREENSHOTS) -> list[str]:
    """Open a page in the first view, and look at it in each."""
    found: list[str] = []
    for device, scheme in views:
        look(chrome, WIDTHS[device], scheme)
        if (device, scheme) == views[0]:
            chrome.get(url)
            wait_for_diagrams(chrome)
        if not has_colours(chrome, {"light": "default", "dark": "slate"}[scheme]):
            found.append(f"{name}, {device}, {scheme}: not in the colours of the system")
        faults = lasting_faults(chrome)
        found += [f"{name}, {device}, {scheme}: {fault}" for fault in faults]
        picture = chrome.execute_cdp_cmd("Page.captureScreenshot", {"format": "jpeg", "quality": 60})
        (pictures / f"{name}-{device}-{scheme}.jpg").write_bytes(base64.b64decode(picture["data"]))
    log: list[dict[str, Any]] = chrome.get_log("browser")  # pyright: ignore
    return found + [f"{name}: {entry['message']}" for entry in log if entry["level"] != "INFO"]


def test_no_page_has_an_error_an_undrawn_diagram_or_cut_text(chrome: Chrome, site: Path, address: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    pages = sorted(path.parent.relative_to(site) for path in site.rglob("index.html"))
    assert len(pages) > 50
    found: list[str] = []
    for number, page in enumerate(pages):
        name = "home" if page == Path() else str(page).replace("/", "-")
        # Each begins in the last view of the one before, since a new size costs the old page 0.1 s.
        views = VIEWS[::-1] if number % 2 else VIEWS
        found += faults_of(chrome, f"{address}/{page.as_posix()}/", name, views)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            "<p style='width: 100px; overflow: hidden; white-space: nowrap'>A line that is longer than its box.</p>",
            "cut: A line",
        ),
        ("<p style='width: 3000px'>" + "word " * 200 + "</p>", "the page scrolls sideways"),
        ("<pre class='mermaid'>flowchart LR\n  a --> graph[x]</pre>", "no diagram"),
        ("<img src='nowhere.png'>", "no picture"),
        ("<script>console.error('an error')</script>", "an error"),
    ],
)
def test_faults_are_found(
    chrome: Chrome, body: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SETTLES", 0.2)
    monkeypatch.setitem(globals(), "DRAWS", 0.2)
    (tmp_path / "planted.html").write_text(f"<!doctype html><body data-md-color-scheme='default'>{body}</body>")
    chrome.get_log("browser")  # pyright: ignore
    with served(tmp_path) as address:
        found = faults_of(chrome, f"{address}/planted.html", "planted", pictures=tmp_path)
    assert any(fault in each for each in found), found


def test_search_finds_flags_settings_and_tasks(chrome: Chrome, address: str) -> None:
    look(chrome, WIDTHS["desktop"], "light")
    chrome.get(f"{address}/roadmap/")
    chrome.execute_script("document.querySelector('#__search').click()")
    pages = SEARCHES | dict.fromkeys(TASKS, "tasks")
    missed = {words: page for words, page in pages.items() if not finds(chrome, words, page)}
    assert missed == {}


def test_the_page_of_tasks_is_two_clicks_away_and_has_each_task(site: Path) -> None:
    home, start = ((site / name / "index.html").read_text() for name in ("", "start"))
    assert 'href="start/"' in home and 'href="../tasks/"' in start
    page = html.unescape(re.sub(r"</?(?:span|code)\b[^>]*>", "", (site / "tasks/index.html").read_text()))
    assert {words: text for words, text in TASKS.items() if text not in page} == {}


def finds(chrome: Chrome, words: str, page: str) -> bool:
    """Return True if a page is among the first five results of a search, once those of the last one are gone."""
    field = chrome.find_element("css selector", "input.md-search__input")
    field.clear()
    field.send_keys(" ")
    if not wait_for_links(chrome, lambda links: not links):
        return False
    field.send_keys(words)
    return wait_for_links(chrome, lambda links: any(f"/{page}/" in link for link in links))


def wait_for_links(chrome: Chrome, accepts: Callable[[list[str]], bool]) -> bool:
    """Wait for a search's first five results to be accepted, 10 s at most."""
    until = time.monotonic() + 10
    results = ".md-search-result__item > .md-search-result__link"
    while not accepts(
        chrome.execute_script(f"return [...document.querySelectorAll('{results}')].map((each) => each.href)")[:5]
    ):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_each_flag_has_an_anchor_and_bars_are_bars(site: Path) -> None:
    settings, commands = ((site / "reference" / name / "index.html").read_text() for name in ("settings", "commands"))
    anchors = set(re.findall(r'<a class="flag" id="([^"]+)"', settings))
    assert {name.replace("_", "-") for name in (*ENGINE_FIELDS, *SERVER_FIELDS)} <= anchors
    assert {"chat-system", "explain-batch", "bench-serve-base-url"} <= set(re.findall(r' id="([^"]+)"', commands))
    assert "&amp;#124;" not in settings + commands and "╭" not in commands
