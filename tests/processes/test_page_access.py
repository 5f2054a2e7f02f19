"""The chat page for people without a mouse, a screen, daylight or room, in a real browser.

What a screen reader gets is read from the browser's accessibility tree.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.support.processes.chat_page import (
    ENDLESS,
    MARKS,
    PATIENCE_MS,
    ask,
    attach,
    browser,
    open_page,
    whole_answer,
)
from tests.support.processes.pictures import data_url

__all__ = ["browser", "open_page"]
pytestmark = MARKS
LEAST_CONTRAST = 4.5
"""WCAG 2.2, success criterion 1.4.3 (AA)."""
LEAST_TARGET = 24.0
"""Pixels of what is touched: success criterion 2.5.8 (AA)."""
CONTROLS = ("button", "link", "textbox", "spinbutton", "DisclosureTriangle", "image", "dialog")
LANDMARKS = ("main", "navigation", "form", "log", "group", "heading")

Node = dict[str, Any]


def tree(page: Page) -> list[Node]:
    """Nodes of the accessibility tree as {role, name, ...properties}."""
    session = page.context.new_cdp_session(page)
    session.send("Accessibility.enable")
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    return [
        {
            **{one["name"]: one["value"].get("value") for one in node.get("properties", ())},
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
        }
        for node in nodes
        if not node["ignored"]
    ]


def named(page: Page, roles: tuple[str, ...]) -> list[tuple[str, str]]:
    return sorted((one["role"], one["name"]) for one in tree(page) if one["role"] in roles)


def test_every_control_has_a_name_for_a_screen_reader(shared: Any, open_page: Any) -> None:
    page = open_page(shared[1].url)
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    attach(page, [data_url(1)])
    page.get_by_text("Options").click()
    assert named(page, CONTROLS) == sorted([
        ("button", "New chat"),
        ("button", "API key"),
        ("link", "API docs"),
        ("image", "scene-0.png"),
        ("button", "Remove scene-0.png"),
        ("textbox", "Message"),
        ("button", "Attach"),
        ("button", "Send"),
        ("DisclosureTriangle", "Options"),
        ("spinbutton", "Temperature"),
        ("spinbutton", "Output tokens"),
        ("textbox", "System prompt"),
    ])  # fmt: skip
    assert named(page, LANDMARKS) == sorted([
        ("heading", "tiny-vlm"),
        ("navigation", "Page"),
        ("main", ""),
        ("log", "Conversation"),
        ("form", "Your message"),
        ("group", "Attached files"),
        ("group", ""),
    ])  # fmt: skip
    page.click("#set-key")
    # What is behind the dialog is not read out.
    assert named(page, CONTROLS) == sorted([
        ("dialog", "This server asks for an API key. It stays in this tab."),
        ("textbox", "API key"),
        ("button", "Use key"),
    ])  # fmt: skip


def test_an_answer_is_read_out_once_it_is_whole(shared: Any, open_page: Any) -> None:
    page = open_page(shared[1].url)
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    page.evaluate(ENDLESS)
    page.fill("#text", "hello")
    page.click("#send")
    expect(page.locator("article.assistant p").first).not_to_be_empty(timeout=PATIENCE_MS)

    def said() -> tuple[Node, Node, list[Node]]:
        nodes = tree(page)
        (log,) = [one for one in nodes if one["role"] == "log"]
        *_, answer = [one for one in nodes if one["role"] == "article"]
        return log, answer, nodes

    log, answer, nodes = said()
    assert log["live"] == "polite"
    assert (answer["name"], answer.get("busy")) == ("Answer", True)
    assert ("button", "Stop") in [(one["role"], one["name"]) for one in nodes]
    page.keyboard.press("Escape")
    expect(page.locator("p.stopped")).to_have_text("Stopped.")
    log, answer, nodes = said()
    assert not answer.get("busy")
    assert [one["name"] for one in nodes if one["role"] == "article"] == ["You", "Answer"]
    assert [one.get("live") for one in nodes if one["role"] == "status"] == ["polite", "polite"]
    expect(page.locator("#text")).to_be_focused()


def focus(page: Page) -> str:
    """What has the focus; it must be visible that it has."""
    found = page.evaluate("""() => {
      const one = document.activeElement, shown = one.closest(".button") || one;
      const style = getComputedStyle(shown), isDrawn = style.outlineStyle !== "none";
      return [one.id || one.tagName, isDrawn && parseFloat(style.outlineWidth)];
    }""")
    assert found[1], f"nothing shows that {found[0]} has the focus"
    return str(found[0])


def tab(page: Page, times: int, key: str = "Tab") -> list[str]:
    found = []
    for _ in range(times):
        page.keyboard.press(key)
        found.append(focus(page))
    return found


def test_everything_is_done_by_keyboard_alone(shared: Any, open_page: Any) -> None:
    page = open_page(shared[1].url)
    page.on("filechooser", lambda _: None)  # from the beginning: a key may come before it is heard
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    assert focus(page) == "text", "typing may begin at once"
    assert tab(page, 3) == ["files", "send", "SUMMARY"]
    page.keyboard.press("Enter")
    assert tab(page, 3) == ["temperature", "max-tokens", "system"]
    tab(page, 2, "Shift+Tab")
    page.keyboard.type("0")
    assert tab(page, 3, "Shift+Tab") == ["SUMMARY", "send", "files"]
    with page.expect_file_chooser() as chosen:
        page.keyboard.press("Enter")
    chosen.value.set_files(
        [{"name": "a.png", "mimeType": "image/png", "buffer": image_bytes()},
         {"name": "b.png", "mimeType": "image/png", "buffer": image_bytes()}]
    )  # fmt: skip
    expect(page.locator("#chips figure")).to_have_count(2)
    tab(page, 2, "Shift+Tab")
    page.keyboard.press("Enter")  # b.png is removed
    expect(page.locator("#chips figure")).to_have_count(1)
    assert focus(page) == "text"
    page.keyboard.type("what color is it?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    assert whole_answer(page, 0)
    assert focus(page) == "text"
    assert tab(page, 4, "Shift+Tab") == ["log", "docs", "set-key", "fresh"]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert focus(page) == "key"
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_hidden()
    assert focus(page) == "set-key"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")  # New chat
    expect(page.locator("article")).to_have_count(0)
    assert focus(page) == "text"


def image_bytes() -> bytes:
    return base64.b64decode(data_url(3).partition(",")[2])


CONTRASTS = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const pixel = (colour, below) => {  // what the browser paints, 0 to 255
    context.fillStyle = below; context.fillRect(0, 0, 1, 1);
    context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
  const light = values => values.map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    const chain = [];
    for (let at = node; at; at = at.parentElement)
      chain.unshift(getComputedStyle(at).backgroundColor);
    return chain.reduce((below, colour) => css(pixel(colour, below)), css(window.canvasColour));
  };
  const found = [];
  const add = (node, text, colour) => {
    const below = behind(node);
    const [a, b] = [light(pixel(colour, below)), light(pixel(below, below))];
    found.push({text, ratio: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), below: b});
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !node.checkVisibility({visibilityProperty: true}) || node.closest("script, style"))
      continue;
    add(node, text, getComputedStyle(node).color);
  }
  const field = document.getElementById("text");
  add(field, field.placeholder, getComputedStyle(field, "::placeholder").color);
  return found;
}"""
"""Contrast of every text that is seen with what is behind it, and how light that is (0 to 1)."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_by_day_and_by_night(
    shared: Any, samples: Any, open_page: Any, tmp_path: Any, scheme: str
) -> None:
    page = open_page(shared[1].url, color_scheme=scheme, refused=400)
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    a_conversation(page)
    picture = page.screenshot(path=tmp_path / f"{scheme}.png")
    page.evaluate("colour => { window.canvasColour = colour; }", corner(picture))
    found = page.evaluate(CONTRASTS)
    assert len(found) > 25
    assert {one["text"] for one in found} >= {"Attach", "Send", "Stopped.", "Time to first token"}
    poor = [one for one in found if one["ratio"] < LEAST_CONTRAST]
    assert poor == []
    backgrounds = sorted(one["below"] for one in found if one["text"] != "Send")
    assert backgrounds[0] > 0.7 if scheme == "light" else backgrounds[-1] < 0.1


def corner(picture: bytes) -> list[int]:
    """Red, green and blue of a picture's first pixel: the page where nothing is."""
    with Image.open(io.BytesIO(picture)) as image:
        return list(image.convert("RGB").getpixel((0, 0)))


def a_conversation(page: Page) -> None:
    """A whole answer about an image, another one that reuses it, a stopped one and a refusal."""
    attach(page, [data_url(2)])
    assert ask(page, "what color is it?")
    assert ask(page, "what shape is it?")
    page.get_by_text("Options").click()
    page.fill("#max-tokens", "99999999")
    page.fill("#text", "too much")
    page.press("#text", "Enter")
    expect(page.locator("p.error")).to_contain_text("max_tokens")
    page.fill("#max-tokens", "7000")
    page.evaluate(ENDLESS)
    page.press("#text", "Enter")
    expect(page.locator("article.assistant p").last).not_to_be_empty(timeout=PATIENCE_MS)
    page.keyboard.press("Escape")
    expect(page.locator("p.stopped")).to_have_text("Stopped.")


@pytest.mark.parametrize("width", [320, 375])
def test_a_phone_has_room_for_everything(shared: Any, open_page: Any, width: int) -> None:
    size = {"width": width, "height": 640}
    page = open_page(shared[1].url, viewport=size, has_touch=True, is_mobile=True)
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    attach(page, [data_url(5)])
    expect(page.locator("#chips figure")).to_be_visible()
    page.fill("#text", "what color is it?")
    page.locator("#send").tap()
    assert whole_answer(page, 0)
    room = page.evaluate("document.getElementById('log').clientHeight")
    assert room >= 240, "the answer has no room left"
    attach(page, [data_url(6)])
    page.get_by_text("Options").tap()
    seen = page.evaluate("""() => {
      const all = "button, a, textarea, summary, .button, input";
      const controls = [...document.querySelectorAll(all)];
      return {
        width: document.documentElement.scrollWidth,
        log: document.getElementById("log").clientHeight,
        font: parseFloat(getComputedStyle(document.getElementById("text")).fontSize),
        boxes: controls.filter(one => one.checkVisibility() && !one.closest(".hidden"))
          .map(one => ({name: one.innerText || one.id, ...one.getBoundingClientRect().toJSON()})),
      };
    }""")
    assert seen["width"] <= width, "the page scrolls sideways"
    assert seen["font"] >= 16, "a phone zooms into smaller fields"
    assert seen["log"] >= 120, "with options and a file the answer has no room left"
    assert len(seen["boxes"]) > 9
    for box in seen["boxes"]:
        assert min(box["width"], box["height"]) >= LEAST_TARGET, box
        assert box["left"] >= 0, box
        assert box["right"] <= width, box
        assert box["bottom"] <= 640, "not on the screen"
