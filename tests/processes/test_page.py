"""The chat page in a real browser, against real processes."""

from __future__ import annotations

import base64
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
PATIENCE_MS = 120_000
"""A busy machine answers late; a page that never answers still fails."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a URL in a fresh profile and fails where the console reports an error."""
    contexts, errors = [], []

    def run(url: str, *, refused: int = 0, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        expected = f"status of {refused}" if refused else "\0"
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda said: (
                said.type == "error"
                and expected not in said.text
                and errors.append(f"{said.text} {said.location}")
            ),
        )
        page.goto(url)
        return page

    yield run
    for context in contexts:
        context.close()
    assert errors == []


def attach(page: Page, images: list[str]) -> None:
    """`images`: data URLs, as the API takes them."""
    page.set_input_files("#files", [
        {"name": f"scene-{i}.png", "mimeType": "image/png",
         "buffer": base64.b64decode(image.partition(",")[2])}
        for i, image in enumerate(images)
    ])  # fmt: skip


def ask(page: Page, text: str) -> str:
    """The text of the answer, once it is whole."""
    before = page.locator("article.assistant").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    answer = page.locator("article.assistant").nth(before)
    expect(answer.locator("dl")).to_be_visible(timeout=PATIENCE_MS)
    return answer.locator("p").first.inner_text()


def figure(page: Page, name: str) -> str:
    """A figure below the last answer."""
    pair = page.locator("article.assistant").last.locator("dl > div", has_text=name)
    return pair.locator("dd").inner_text()


def question_of(sample: Any) -> tuple[list[str], str]:
    """Images and text of a sample of one turn."""
    from evaluate import to_request

    (user,) = to_request(sample, "tiny-vlm")["messages"]
    images = [part["image_url"]["url"] for part in user["content"] if part["type"] != "text"]
    (text,) = [part["text"] for part in user["content"] if part["type"] == "text"]
    return images, text


def test_an_image_is_answered_right_and_crosses_once(shared, samples, open_page) -> None:
    sample = next(one for one in samples if one.family == "colour" and len(one.messages) == 1)
    images, text = question_of(sample)
    page = open_page(shared[1].url + "/")
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    expect(page.locator("#limits")).to_contain_text("image")
    page.get_by_text("Options").click()
    page.fill("#temperature", "0")
    attach(page, images)
    assert ask(page, text) == sample.reference
    assert figure(page, "Time to first token").endswith("ms")
    assert "saved" not in figure(page, "Upload")
    assert ask(page, text)
    assert figure(page, "Upload").startswith("0 B")
    assert figure(page, "IPC cache").startswith("1 of 1 held")
    assert "encoded" not in figure(page, "Encoder cache")
    assert int(figure(page, "Prefix cache").split()[0]) > 0


def test_text_is_never_markup_and_a_refusal_loses_nothing(shared, open_page) -> None:
    page = open_page(shared[1].url, refused=400)
    page.get_by_text("Options").click()
    page.fill("#max-tokens", "99999999")
    page.fill("#text", "<b id=bold>hello</b>")
    page.click("#send")
    expect(page.locator("p.error")).to_contain_text("max_tokens")
    assert page.input_value("#text") == "<b id=bold>hello</b>"
    assert page.locator("#bold").count() == 0
    page.set_input_files(
        "#files", [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"no picture"}]
    )
    expect(page.locator("#note")).to_contain_text("a.txt is text/plain")
    page.fill("#max-tokens", "4")
    assert ask(page, "hello")


ENDLESS = """() => {
const send = window.fetch;
window.fetch = (url, options) => {
  if (options && options.body)
    options.body = JSON.stringify({
      ...JSON.parse(options.body), ignore_eos: true, max_tokens: 7000,
    });
  return send(url, options);
};
}"""


@pytest.mark.parametrize("how", ["escape", "button", "tab"])
def test_a_stream_ends_with_who_reads_it(shared, open_page, how) -> None:
    _, asker = shared
    page = open_page(asker.url)
    page.evaluate(ENDLESS)
    page.fill("#text", "hello")
    page.click("#send")
    answer = page.locator("article.assistant p")
    expect(answer).not_to_be_empty(timeout=PATIENCE_MS)
    assert asker.http.get("/load").json()["server_load"] == 1, answer.inner_text()
    if how == "tab":
        page.close()
    else:
        page.keyboard.press("Escape") if how == "escape" else page.click("#stop")
        expect(page.locator("article.assistant dl")).to_have_text("Stopped.")
    end = time.monotonic() + PATIENCE_MS / 1000
    while asker.http.get("/load").json()["server_load"]:
        assert time.monotonic() < end, "the request goes on without a reader"
        time.sleep(0.05)


def test_a_key_behind_a_path_prefix_on_a_phone(start, tmp_path, open_page) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right-key\n")
    _, (asker,) = start(api_key_file=str(keys))

    def forward(route: Route) -> None:
        url = route.request.url.replace("/team/vlm", "", 1)
        route.fulfill(response=route.fetch(url=url, timeout=PATIENCE_MS))

    context = {"viewport": {"width": 375, "height": 667}, "color_scheme": "dark"}
    page = open_page("about:blank", refused=401, **context)
    page.route("**/team/vlm**", forward)
    page.goto(asker.url + "/team/vlm")
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "right-key")
    page.press("#key", "Enter")
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    page.fill("#max-tokens", "4", force=True)
    assert ask(page, "hello")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 375, "the page scrolls sideways on a phone"
