"""The page: its files, and what it does in headless Chromium against a server that we control."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from fastapi import FastAPI
from selenium.webdriver.common.keys import Keys

from draftwood.errors import MissingExtraError
from draftwood.serve.page import CONTENT_SECURITY_POLICY, mount_page, static_files
from tests.serve.browser import Page
from tests.serve.fake_api import KEY, MODEL, FakeAPI, Running
from tests.serve.record import ANSWERS

RECORDED: dict[str, Any] = json.loads(ANSWERS.read_text(encoding="utf-8"))
QUESTION: str = RECORDED["question"]
TEXT = "".join(chunk["content"] for chunk in RECORDED["speculative"]["chunks"])
ROUNDS = [r for chunk in RECORDED["speculative"]["chunks"] for r in chunk["rounds"]]


@pytest.fixture(scope="module")
def api() -> Iterator[FakeAPI]:
    api = FakeAPI()
    running = Running(api.app)
    api.url = running.url
    yield api
    running.stop()


@pytest.fixture(scope="module")
def _browser() -> Iterator[Page]:
    page = Page()
    yield page
    page.close()


@pytest.fixture
def page(_browser: Page, api: FakeAPI) -> Iterator[Page]:
    """The page, freshly loaded, against an API without delays; afterwards nobody has complained."""
    api.pace, api.wants_key = 0.0, False
    api.asked.clear()
    _browser.open(api.url)
    _browser.complaints()
    yield _browser
    assert _browser.complaints() == []


# --- files ------------------------------------------------------------------------------------


def get(url: str, **headers: str) -> tuple[int, Any, bytes]:
    """Status, headers and body."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_files_come_with_a_policy_and_a_tag(api: FakeAPI) -> None:
    """Type, policy and tag of every file; with the tag nothing is sent twice."""
    kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg"}
    names = {"": "index.html"} | {f"static/{name}": name for name in static_files()}
    assert len(names) >= 7
    for path, name in names.items():
        status, headers, body = get(f"{api.url}/{path}")
        assert (status, body) == (200, static_files()[name])
        assert headers["Content-Type"].startswith(kinds[name.rpartition(".")[2]])
        assert headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
        status, _, body = get(f"{api.url}/{path}", **{"If-None-Match": headers["ETag"]})
        assert (status, body) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2fpage.py", "%2e%2e/page.py", "a/b"])
def test_other_files_are_not_served(api: FakeAPI, name: str) -> None:
    status, _, body = get(f"{api.url}/static/{name}")
    assert status == 404
    assert b"draftwood.errors" not in body


def test_the_page_is_no_part_of_the_api(api: FakeAPI) -> None:
    """OpenAPI's document does not have it; HEAD is answered, other methods are not."""
    assert not [path for path in api.app.openapi()["paths"] if not path.startswith("/v1/")]
    for method, wanted in (("HEAD", 200), ("POST", 405)):
        request = urllib.request.Request(f"{api.url}/", method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            status = error.code
        assert status == wanted


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'draftwood\[server\]'"):
        mount_page(FastAPI())


def test_files_ask_nothing_of_others() -> None:
    """No address of another server, no inline script or style, no text taken for markup."""
    for name, body in static_files().items():
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def palette(css: str) -> dict[str, str]:
    """Variables that are colours."""
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", css))


def luminance(color: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast of two colours (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_told_apart() -> None:
    """Text has a contrast of 4.5 and marks of 3 on every ground, in light and in dark."""
    css = static_files()["style.css"].decode()
    light, dark = css.split("prefers-color-scheme: dark", 1)
    for colors in (palette(light), palette(dark)):
        assert len(colors) >= 14
        for text, ground in product(("ink", "soft", "accent"), ("paper", "card", "tint")):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
        assert contrast(colors["warn"], colors["warn-paper"]) >= 4.5
        assert contrast(colors["on-accent"], colors["accent"]) >= 4.5
        for name in ("suffix", "recycling", "model", "other"):
            assert contrast(colors[name], colors["paper"]) >= 3, name


# --- an answer --------------------------------------------------------------------------------


def test_an_answer_and_its_rounds(page: Page, api: FakeAPI) -> None:
    """The text is the server's, all rounds are there, the figures are what they give."""
    page.ask(QUESTION)
    page.finish()
    assert page.answers() == [TEXT]
    assert page.text("model") == MODEL
    assert page.text("which") == f"{len(ROUNDS)} of {len(ROUNDS)}"
    assert page.text("rate") == f"{RECORDED['speculative']['tokens_per_s']:.0f}"
    assert "estimate" in page.text("rate-note")
    assert page.text("cached") == str(RECORDED["speculative"]["num_cached_tokens"])
    last = ROUNDS[-12:]
    right = sum(len(r["path"]) - 1 for r in last) / sum(len(r["tokens"]) - 1 for r in last)
    assert page.text("accepted") == f"{100 * right:.0f} %"
    per_round = sum(r["new_tokens"] for r in last) / len(last)
    assert float(page.text("per-round")) == pytest.approx(per_round, abs=0.051)
    heights = len(page.all("#history rect.right"))
    assert heights == len(ROUNDS)
    [body] = api.asked
    assert body["messages"] == [{"role": "user", "content": QUESTION}]
    assert body["stream"] is body["rounds"] is body["speculation"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert "max_tree_nodes" not in body
    assert page.get("log").get_attribute("aria-busy") == "false"


def test_every_round_is_drawn_as_it_was(page: Page) -> None:
    """Nodes, marks by drafter, the accepted path, the sentence: for rounds of all kinds."""
    page.ask(QUESTION)
    page.finish()
    seen = set()
    for number in range(0, len(ROUNDS), 4):
        page.js(
            f"(s => {{ s.value = {number}; s.dispatchEvent(new Event('input')) }})"
            "(document.getElementById('scrub'))"
        )
        round_ = ROUNDS[number]
        guesses, right = len(round_["tokens"]) - 1, len(round_["path"]) - 1
        assert page.text("which") == f"{number + 1} of {len(ROUNDS)}"
        own = int(round_["new_tokens"] > right)
        assert len(page.all("#tree g")) == guesses + 1 + own
        assert len(page.all("#tree .edge")) == guesses + own
        assert len(page.all("#tree g.right")) == 1 + right + own
        for name in ("suffix", "recycling"):
            by_name = [s for s in round_["sources"] if s.partition(":")[0] == name]
            assert len(page.all(f"#tree g.{name}")) == len(by_name)
            assert bool(by_name) == (name in page.text("legend"))
            seen.update(by_name)
        words = page.text("sentence")
        assert words.startswith(f"{guesses} guess" if guesses else "No guess")
        assert f"{right} right" in words or right == 0
        own_text = round_["new_text"].removeprefix(
            "".join(round_["tokens"][node] for node in round_["path"][1:])
        )
        assert f"own token {json.dumps(own_text)}" in words
    assert len(seen) > 5


def test_a_chosen_round_is_marked_in_the_text(page: Page) -> None:
    """The part of the answer that a round gave."""
    page.ask(QUESTION)
    page.finish()
    assert page.all(".here") == []
    page.get("before").click()
    [here] = page.all(".here")
    assert here.get_property("textContent") in TEXT
    assert page.text("which").startswith(f"{len(ROUNDS) - 1} of")
    page.get("live").click()
    assert page.text("which").startswith(f"{len(ROUNDS)} of")
    assert page.all(".here") == []


def test_the_tree_as_a_table(page: Page) -> None:
    """What the picture shows, for those who do not see it."""
    page.ask(QUESTION)
    page.finish()
    page.all("#table-box summary")[0].click()
    page.get("before").click()
    round_ = ROUNDS[-2]
    page.wait(lambda: len(page.all("#table tr")) == len(round_["tokens"]))
    yes = [row for row in page.all("#table tr") if row.text.endswith("yes")]
    assert len(yes) == len(round_["path"]) - 1


def test_the_difference_can_be_felt(page: Page, api: FakeAPI) -> None:
    """Asked again without speculation: same seed, same words, and the factor."""
    page.ask(QUESTION)
    page.finish()
    page.all(".again")[0].click()
    page.finish()
    assert page.answers() == [TEXT, TEXT]
    assert not page.get("speculation").is_selected()
    first, second = api.asked
    assert second == {**first, "speculation": False}
    [same] = page.all(".answer .same")
    factor = RECORDED["speculative"]["tokens_per_s"] / RECORDED["plain"]["tokens_per_s"]
    assert f"The same words, {factor:.1f}\N{MULTIPLICATION SIGN} as fast" in same.text
    assert "measured" in page.text("rate-note")
    assert page.text("sentence").startswith("No guess: plain decoding")
    assert page.text("per-round") == "1.0"
    assert len(page.all(".again")) == 1


def test_the_conversation_goes_on_and_begins_anew(page: Page, api: FakeAPI) -> None:
    page.ask(QUESTION)
    page.finish()
    page.ask("And a queue?")
    page.finish()
    roles = [m["role"] for m in api.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert api.asked[-1]["messages"][1]["content"] == TEXT
    page.get("new").click()
    assert page.answers() == []
    assert page.text("which") == "none yet"
    page.ask(QUESTION)
    page.finish()
    assert len(api.asked[-1]["messages"]) == 1


def test_the_first_sight_explains_itself(page: Page, api: FakeAPI) -> None:
    """Before anything is asked there is an example, said to be one, and questions to click."""
    assert page.text("sentence").startswith('An example. 8 guesses, 3 right: " brown fox jumps"')
    assert len(page.all("#tree g")) == 8 + 2
    idea = page.all(".idea")[1]
    words = idea.text
    idea.click()
    page.finish()
    assert api.asked[0]["messages"] == [{"role": "user", "content": words}]
    assert not page.get("hello").is_displayed()
    assert not page.text("sentence").startswith("An example")


def test_parameters_are_sent(page: Page, api: FakeAPI) -> None:
    for name, value in (
        ("temperature", "0.7"),
        ("seed", "42"),
        ("max-tokens", "99"),
        ("max-nodes", "6"),
    ):
        page.set(name, value)
    page.switch()
    page.ask(QUESTION)
    page.finish()
    wanted = {"temperature": 0.7, "seed": 42, "max_tokens": 99, "max_tree_nodes": 6}
    assert wanted.items() <= api.asked[0].items()
    assert api.asked[0]["speculation"] is False


def test_wrong_parameters_are_not_sent(page: Page, api: FakeAPI) -> None:
    page.set("temperature", "3")
    page.ask(QUESTION)
    assert api.asked == []
    assert page.js("document.activeElement.id") == "temperature"


# --- when something goes wrong ----------------------------------------------------------------


def test_stop_keeps_what_had_come(page: Page, api: FakeAPI) -> None:
    """Escape ends the request at the server too; the text so far stays and counts."""
    api.pace = 2.0
    page.ask(QUESTION)
    page.wait(lambda: len("".join(page.answers())) > 40)
    cut = api.num_cut
    page.get("question").send_keys(Keys.ESCAPE)
    page.finish()
    assert "kept" in page.notice()
    page.wait(lambda: api.num_open == 0)
    assert api.num_cut == cut + 1
    [text] = page.answers()
    assert TEXT.startswith(text)
    assert len(text) < len(TEXT)
    api.pace = 0.0
    page.ask("Go on.")
    page.finish()
    assert api.asked[-1]["messages"][1]["content"] == text


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("busy", "The server is busy. Try again in 3 seconds."),
        ("long", "the prompt has 9000 tokens, and the context holds 2048"),
        ("broken", "The server failed: the engine has ended"),
    ],
)
def test_refusals_are_said_in_words(page: Page, question: str, words: str) -> None:
    """The message is shown, the question comes back into its field, and one can go on."""
    page.ask(question)
    assert page.notice() == words
    page.finish()
    assert page.get("question").get_property("value") == question
    assert page.all(".said, .answer") == []
    page.get("question").clear()
    page.ask(QUESTION)
    page.finish()
    assert page.answers() == [TEXT]
    assert not page.get("notice").is_displayed()


@pytest.mark.parametrize(
    ("question", "words"),
    [("error", "The answer broke off: out of memory"), ("cut", "The connection broke off.")],
)
def test_an_answer_that_breaks_off_is_kept(page: Page, question: str, words: str) -> None:
    page.ask(question)
    assert page.notice().startswith(words)
    page.finish()
    [text] = page.answers()
    assert text == "".join(c["content"] for c in RECORDED["speculative"]["chunks"][:5])


def test_a_server_that_is_gone(page: Page, api: FakeAPI) -> None:
    """Nobody listens: a sentence, and the question is not lost."""
    running = Running(api.app)
    page.open(running.url)
    running.stop()
    page.ask(QUESTION)
    assert page.notice() == "The server cannot be reached. Is it running?"
    assert page.get("question").get_property("value") == QUESTION


def test_a_key_is_asked_for_and_kept(page: Page, api: FakeAPI) -> None:
    """Without it the page says where to enter it; it is kept for this tab only."""
    api.wants_key = True
    page.open(api.url)
    assert "API key" in page.notice()
    page.set("key", KEY + Keys.TAB)
    page.wait(lambda: page.text("model") == MODEL)
    page.ask(QUESTION)
    page.finish()
    assert page.answers() == [TEXT]
    assert page.js("sessionStorage.getItem('key')") == KEY
    assert page.js("localStorage.length") == 0


def test_markup_is_text(page: Page, api: FakeAPI) -> None:
    """What a user or a model says is never markup."""
    evil = "<img src=x onerror=window.bad=1><script>window.bad=1</script>"
    page.ask(evil)
    page.finish()
    assert page.all(".said")[0].text == evil
    assert page.js("window.bad") is None
    assert api.asked[0]["messages"][0]["content"] == evil


# --- for everybody ----------------------------------------------------------------------------


def test_nothing_is_asked_of_others(page: Page, api: FakeAPI) -> None:
    page.ask(QUESTION)
    page.finish()
    names = page.js("performance.getEntriesByType('resource').map(e => e.name)")
    assert len(names) >= 6
    assert all(name.startswith(api.url) for name in names)


def test_the_keyboard_is_enough(page: Page, api: FakeAPI) -> None:
    """Tab reaches everything in order; Space flips the switch; arrows go through the rounds."""
    focus = page.js
    reached = []
    for _ in range(12):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(focus("document.activeElement.id || document.activeElement.className"))
        if reached[-1] == "question":
            break
    assert reached == ["skip", "speculation", "new", "log", *["idea"] * 3, "question"]
    active = page.driver.switch_to.active_element
    active.send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two", Keys.ENTER)
    page.finish()
    assert api.asked[0]["messages"][0]["content"] == "one\ntwo"
    assert focus("document.activeElement.id") == "question"
    page.get("speculation").send_keys(Keys.SPACE)
    assert not page.get("speculation").is_selected()
    page.get("scrub").send_keys(Keys.HOME)
    assert page.text("which").startswith("1 of")
    page.get("scrub").send_keys(Keys.ARROW_RIGHT)
    assert page.text("which").startswith("2 of")
    assert page.get("scrub").get_attribute("aria-valuetext") == page.text("which")


def test_everything_has_a_name(page: Page) -> None:
    """Each control and picture says to a screen reader what it is."""
    page.ask(QUESTION)
    page.finish()
    page.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
    things = page.all("button, input, textarea, summary, svg[role=img], [role=log], [role=group]")
    assert len(things) > 20
    for thing in filter(lambda one: one.is_displayed(), things):
        assert thing.accessible_name.strip(), thing.get_attribute("outerHTML")


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1360])
def test_no_width_is_too_narrow(page: Page, width: int) -> None:
    """Nothing sticks out at the side; on a narrow screen the rounds are below the chat."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 800}
    page.cdp("Emulation.setDeviceMetricsOverride", **size)
    try:
        page.ask(QUESTION)
        page.finish()
        assert page.js("document.documentElement.scrollWidth") <= width
        chat, rounds = (page.all(name)[0].rect for name in (".chat", ".rounds"))
        below = rounds["y"] >= chat["y"] + chat["height"]
        assert below == (width <= 860)
        assert page.all(".rounds")[0].rect["width"] > width / 2 - 30
    finally:
        page.cdp("Emulation.clearDeviceMetricsOverride")


def test_dark_and_still_where_wanted(page: Page) -> None:
    """The user's choices of colours and motion are followed."""

    def ground() -> float:
        rgb = page.js("getComputedStyle(document.documentElement).backgroundColor")
        red, green, blue = map(int, re.findall(r"\d+", rgb)[:3])
        return luminance(f"#{red:02x}{green:02x}{blue:02x}")

    def prefer(**features: str) -> None:
        named = [{"name": name.replace("_", "-"), "value": v} for name, v in features.items()]
        page.cdp("Emulation.setEmulatedMedia", features=named)

    moving = "getComputedStyle(document.getElementById('bar-own')).transitionDuration"
    try:
        prefer(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
        assert ground() > 0.8
        assert page.js(moving) == "0.2s"
        prefer(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
        assert ground() < 0.05
        assert page.js(moving) == "0s"
    finally:
        prefer()
