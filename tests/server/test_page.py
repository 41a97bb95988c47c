"""The page at /: in a real browser, where there is one, while requests run; and what holds of its files anywhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import browser as browsers
import httpx
import pytest
from servers import QUESTION, Server

from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.server.chat.tools import ToolChoice
from phonograph.server.http.page import FILES, FOLDER
from phonograph.text.formats import find_formats

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
    # Pages of other tests' servers have errors there too.
    log: list[dict[str, Any]] = chrome.get_log("browser")  # pyright: ignore
    errors = [entry for entry in log if entry["level"] != "INFO" and server.url in entry["message"]]
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


TOOLS = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
CALL = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = "{# <tool_call> #}{% for m in messages %}<|user|>{{ m.content or '' }}{% endfor %}<|assistant|>"


def say(chrome: Chrome, message: str) -> None:
    """Type a message and send it with Enter."""
    from selenium.webdriver.common.by import By

    field = chrome.find_element(By.ID, "question")
    field.send_keys(f"{message}\n")


def turns(chrome: Chrome) -> list[tuple[str, str]]:
    """Return roles and texts of the chat."""
    script = "return [...document.querySelectorAll('.turn')].map((one) => [one.dataset.role, one.innerText])"
    return [(role, shown) for role, shown in chrome.execute_script(script)]


def is_done(chrome: Chrome, count: int) -> bool:
    return len(turns(chrome)) == count and "meanwhile: " in turns(chrome)[-1][1]


def open_chat(chrome: Chrome, server: Server) -> None:
    look(chrome)
    chrome.get("about:blank")
    chrome.get(f"{server.url}/#chat")
    wait(chrome, lambda: text(chrome, "state") == "Live")


def test_a_chat_shows_its_answer_and_the_graphs(chrome: Chrome, serve_with: Callable[..., Server]) -> None:
    server = serve_with({"temperature": 0})
    open_chat(chrome, server)
    assert not chrome.execute_script("return document.getElementById('steps-view').checkVisibility()")
    say(chrome, QUESTION)
    wait(chrome, lambda: is_done(chrome, 2))
    (_, asked), (role, answer) = turns(chrome)
    content = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}).json()
    expected = content["choices"][0]["message"]["content"].strip()
    assert asked == QUESTION and role == "assistant" and answer.startswith(expected)
    count = content["usage"]["completion_tokens"]
    assert re.search(rf"\n{count} tokens in [\d.]+ s\. Steps .*: .*{count - 1} decode in whole graphs", answer), answer
    # Another test may have left the prompt in the prefix cache, so that a graph holds the rest of it.
    assert re.search(r"\d prefill (without a graph \(|in whole graphs)", answer), answer
    # The conversation goes on, and a new one begins without it.
    say(chrome, "And now?")
    wait(chrome, lambda: is_done(chrome, 4))
    tokens, steps = re.findall(r"(\d+) tokens in .* (\d+) decode in", turns(chrome)[3][1])[0]
    assert int(steps) == int(tokens) - 1
    chrome.execute_script("document.getElementById('clear').click()")
    assert turns(chrome) == []
    say(chrome, "<b>&amp;</b>" + "x" * 4000)
    wait(chrome, lambda: is_done(chrome, 2))
    assert turns(chrome)[0][1].startswith("<b>&amp;</b>") and "No answer: messages has" in turns(chrome)[1][1]
    chrome.execute_script("location.hash = '#steps'")
    wait(chrome, lambda: chrome.execute_script("return document.getElementById('steps-view').checkVisibility()"))


def test_a_chat_can_be_stopped(chrome: Chrome, serve_with: Callable[..., Server]) -> None:
    server = serve_with({"ignore_eos": True})
    open_chat(chrome, server)
    say(chrome, "Hi")
    wait(chrome, lambda: len(turns(chrome)) == 2 and len(turns(chrome)[1][1]) > 20)
    assert text(chrome, "send") == "Stop"
    chrome.execute_script("document.getElementById('send').click()")
    wait(chrome, lambda: is_done(chrome, 2) and "Stopped. Steps" in turns(chrome)[1][1])
    server.wait_until_idle()
    assert text(chrome, "send") == "Send"
    # A new chat stops an answer too, and begins without it.
    chrome.execute_script("""
        const send = window.fetch;
        window.sent = [];
        window.fetch = (url, about) => {
          if (about?.body) window.sent.push(JSON.parse(about.body).messages.map((one) => one.role));
          return send(url, about);
        };
    """)
    say(chrome, "Go on")
    wait(chrome, lambda: len(turns(chrome)) == 4 and len(turns(chrome)[3][1]) > 20)
    chrome.execute_script("document.getElementById('clear').click()")
    wait(chrome, lambda: text(chrome, "send") == "Send")
    server.wait_until_idle()
    chrome.execute_script("document.getElementById('tools').value = '{'")
    say(chrome, "Hello")
    wait(chrome, lambda: is_done(chrome, 2))
    chrome.execute_script("document.getElementById('tools').value = ''")
    say(chrome, "Hello")
    wait(chrome, lambda: len(turns(chrome)) == 4 and len(turns(chrome)[3][1]) > 20)
    assert chrome.execute_script("return window.sent") == [["user", "assistant", "user"], ["user"]]
    chrome.execute_script("document.getElementById('send').click()")


def test_a_chat_shows_calls_and_takes_their_results(
    chrome: Chrome, serve_with: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The demo model writes no calls by itself.
    monkeypatch.setattr(ToolChoice, "structured", StructuredOutputs(choice=[CALL]))
    server = serve_with(chat_template=TEMPLATE)
    open_chat(chrome, server)
    chrome.execute_script("document.getElementById('tools').value = arguments[0]", TOOLS)
    say(chrome, QUESTION)
    wait(chrome, lambda: is_done(chrome, 2))
    assert re.match(r'I add\.\s+add \{"a": 1\}\n', turns(chrome)[1][1])
    shown = "return document.getElementById('question').placeholder"
    assert chrome.execute_script(shown) == "Result of add"
    say(chrome, "19")
    wait(chrome, lambda: is_done(chrome, 4))
    assert turns(chrome)[2] == ("tool", "19") and "add {" in turns(chrome)[3][1]
    chrome.execute_script("document.getElementById('tools').value = '{'")
    say(chrome, "19")
    wait(chrome, lambda: is_done(chrome, 6))
    assert "No answer: " in turns(chrome)[5][1]


def test_a_chat_folds_the_reasoning(
    chrome: Chrome, serve_with: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from selenium.webdriver.common.by import By

    monkeypatch.setitem(find_formats._MARKERS, "qwen3", ("<|user|>", "<|assistant|>"))  # type: ignore[arg-type]
    template = TEMPLATE + "<|user|>"
    server = serve_with({"ignore_eos": True}, chat_template=template, reasoning_parser="qwen3", api_key=["secret"])
    look(chrome)
    chrome.get("about:blank")
    chrome.get(f"{server.url}/#chat")
    wait(chrome, lambda: chrome.find_element(By.ID, "key-value").is_displayed())
    chrome.find_element(By.ID, "key-value").send_keys("secret\n")
    wait(chrome, lambda: text(chrome, "state") == "Live")
    say(chrome, "Hi")
    # To the end of the context, which takes 10 s on an idle core.
    wait(chrome, lambda: is_done(chrome, 2), seconds=90)
    folded = "const one = document.querySelector('.thinking'); return [one.open, one.innerText, one.textContent]"
    is_open, seen, whole = chrome.execute_script(folded)
    assert not is_open and seen.strip() == "Thinking" and len(whole) > len("Thinking") + 5
    assert "Cut at the maximum of tokens." in turns(chrome)[1][1]


def test_files(serve_with: Callable[..., Server]) -> None:
    """They need no key, load nothing from elsewhere, and lead nowhere else."""
    guarded = serve_with(api_key=["secret"])
    assert set(FILES) == {"/", "/page/chat.js", "/page/page.css", "/page/page.js", "/page/picture.js", "/page/tiles.js"}
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
