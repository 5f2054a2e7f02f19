"""The chat page in a real browser: pytest fixtures that open it, and what a person does there.

A test module takes the fixtures by importing `browser` and `open_page`. Chromium comes from the
machine's packages; tests are skipped without it (`CHROMIUM` is None).
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
MARKS = [
    pytest.mark.timeout(900),
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
PATIENCE_MS = 120_000
"""A busy machine answers late; a page that never answers still fails."""
VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", event => violations.push(event.effectiveDirective));
"""
"""Run in every page before its own script: what its policy has stopped."""


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """A module's `BROWSER_FLAGS`, if it has any, are given to the program."""
    flags = getattr(request.module, "BROWSER_FLAGS", [])
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *flags])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a URL in a fresh profile; fails where the console reports an error or the page's policy
    stopped something. `refused`: the status of an answer that is expected."""
    contexts, pages, errors = [], [], []

    def run(url: str, *, refused: int = 0, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(VIOLATIONS)
        page = context.new_page()
        pages.append(page)
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
    stopped = [page.evaluate("window.violations || []") for page in pages if not page.is_closed()]
    for context in contexts:
        context.close()
    assert errors == []
    assert not any(stopped), stopped


def attach(page: Page, images: list[str]) -> None:
    """`images`: data URLs, as the API takes them."""
    page.set_input_files("#files", [
        {"name": f"scene-{i}.png", "mimeType": "image/png",
         "buffer": base64.b64decode(image.partition(",")[2])}
        for i, image in enumerate(images)
    ])  # fmt: skip


def bring(page: Page, event: str, name: str, kind: str, data: bytes) -> None:
    """A file by a `drop` or a `paste`."""
    page.evaluate(
        """([event, name, type, text]) => {
          const files = new DataTransfer();
          files.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name,
            {type}));
          const form = document.getElementById("form"), options = {bubbles: true, cancelable: true};
          if (event === "drop") {
            form.dispatchEvent(new DragEvent("dragover", {...options, dataTransfer: files}));
            if (!form.classList.contains("drop")) throw Error("nothing shows where to drop");
            form.dispatchEvent(new DragEvent("drop", {...options, dataTransfer: files}));
          } else {
            form.dispatchEvent(new ClipboardEvent("paste", {...options, clipboardData: files}));
          }
        }""",
        [event, name, kind, base64.b64encode(data).decode()],
    )


def whole_answer(page: Page, before: int) -> str:
    """The text of the answer number `before`, once it is whole."""
    answer = page.locator("article.assistant").nth(before)
    expect(answer.locator("dl")).to_be_visible(timeout=PATIENCE_MS)
    return answer.locator("p").first.inner_text()


def ask(page: Page, text: str) -> str:
    """The text of the answer, once it is whole."""
    before = page.locator("article.assistant").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    return whole_answer(page, before)


def figure(page: Page, name: str) -> str:
    """A figure below the last answer."""
    pair = page.locator("article.assistant").last.locator("dl > div", has_text=name)
    return pair.locator("dd").inner_text()


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
"""Evaluated in a page: its answers go on until they are stopped."""
