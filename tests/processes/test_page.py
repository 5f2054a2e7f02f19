"""The chat page in a real browser, against real processes."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.processes.chat_page import (
    ENDLESS,
    MARKS,
    PATIENCE_MS,
    VIOLATIONS,
    ask,
    attach,
    bring,
    browser,
    figure,
    open_page,
    whole_answer,
)
from tests.support.processes.pictures import data_url

__all__ = ["browser", "open_page"]
pytestmark = MARKS


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
    first = {name: figure(page, name) for name in ("Media and text", "Prefill")}
    assert all(time.endswith("ms") and "when new" not in time for time in first.values())
    assert ask(page, text)
    assert figure(page, "Upload").startswith("0 B")
    assert figure(page, "IPC cache").startswith("1 of 1 held")
    assert "encoded" not in figure(page, "Encoder cache")
    assert int(figure(page, "Prefix cache").split()[0]) > 0
    # What it took is beside what it took when the image was new exactly where it is less: which
    # of two short times is less differs between machines, so the time when new is set here.
    kept = page.evaluate("[millis(firstTimes.media), millis(firstTimes.prefill)]")
    assert kept == list(first.values())
    for new, shown in ((3_600_000, True), (0, False)):
        page.evaluate(f"firstTimes.media = firstTimes.prefill = {new}")
        assert ask(page, text)
        assert all(("when new" in figure(page, name)) == shown for name in first), new


def test_times_when_new_are_of_the_same_files(shared, open_page) -> None:
    """The second image was sent while the first was held: never were both new together."""
    page = open_page(shared[1].url)
    for seed, text in ((7101, "what is it? " * 40), (7102, "and this?")):
        bring(page, "drop", f"{seed}.png", "image/png",
              base64.b64decode(data_url(seed).partition(",")[2]))  # fmt: skip
        ask(page, text)
    assert figure(page, "IPC cache").startswith("1 of 2 held")
    for _ in range(2):
        ask(page, "again?")
        assert figure(page, "IPC cache").startswith("2 of 2 held")
        for name in ("Media and text", "Prefill"):
            assert "when new" not in figure(page, name)


def test_what_is_given_before_the_server_answers_is_not_lost(shared, open_page) -> None:
    asked: list[Route] = []
    page = open_page("about:blank")
    page.route("**/v1/models", lambda route: asked.append(route))
    page.goto(shared[1].url)
    bring(page, "drop", "early.png", "image/png",
          base64.b64decode(data_url(7103).partition(",")[2]))  # fmt: skip
    expect(page.locator("#note")).to_contain_text("attached once the server has answered")
    page.fill("#text", "what is it?")
    page.press("#text", "Enter")
    page.press("#text", "Enter")
    expect(page.locator("#note")).to_contain_text("sent once the server has answered")
    assert page.input_value("#text") == "what is it?"
    for route in asked:
        route.continue_()
    whole_answer(page, 0)
    assert figure(page, "IPC cache").startswith("0 of 1 held")
    assert page.locator("article.user").count() == 1


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
        expect(page.locator("article.assistant p.stopped")).to_have_text("Stopped.")
    end = time.monotonic() + PATIENCE_MS / 1000
    while asker.http.get("/load").json()["server_load"]:
        assert time.monotonic() < end, "the request goes on without a reader"
        time.sleep(0.05)


def test_images_are_pasted_and_dropped_and_other_files_are_refused(
    shared: Any, samples: Any, open_page: Any
) -> None:
    page = open_page(shared[1].url)
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    expect(page.locator("#record")).to_be_hidden()  # this model does not listen
    for seed, event in enumerate(("paste", "drop")):
        image = base64.b64decode(data_url(seed).partition(",")[2])
        bring(page, event, f"{event}.png", "image/png", image)
    bring(page, "drop", "voice.wav", "audio/wav", b"RIFF")
    expect(page.locator("#note")).to_have_text("voice.wav is audio; the model does not take it.")
    expect(page.locator("#chips figure")).to_have_count(2)
    expect(page.locator("#chips")).to_contain_text("paste.png")
    assert "drop" not in (page.get_attribute("#form", "class") or "")
    page.get_by_label("Remove paste.png").click()
    expect(page.locator("#chips figure")).to_have_count(1)
    assert ask(page, "what color is it?")
    assert figure(page, "IPC cache").startswith("0 of 1 held")


def test_the_length_is_told_once_an_engine_has_told_it(shared: Any, open_page: Any) -> None:
    page = open_page("about:blank")
    told: list[int] = []

    def answer(route: Route) -> None:
        card = route.fetch().json()
        told.append(card["data"][0]["max_model_len"])
        if len(told) == 1:
            card["data"][0]["max_model_len"] = 0
        route.fulfill(json=card)

    page.route("**/v1/models", answer)
    page.goto(shared[1].url)
    expect(page.locator("#limits")).to_contain_text("The model is loading; per conversation")
    expect(page.locator("#limits")).to_contain_text(f"Up to {told[0]:,} tokens; per conversation")


def test_a_rate_is_shown_where_there_is_time_to_count(shared: Any, open_page: Any) -> None:
    """Eight tokens in one piece came at Infinity per second."""
    page = open_page(shared[1].url)
    shown = """ended => { const article = document.createElement("article");
      report(article, {at: 0, bytes: 0}, 100, ended, {completion_tokens: 9, prompt_tokens: 1});
      return article.textContent; }"""
    assert "9 tokens, 8 per second" in page.evaluate(shown, 1100)
    for ended in (100, 149):
        assert "per second" not in page.evaluate(shown, ended)


def test_text_that_is_dragged_is_the_browsers_to_drop(shared: Any, open_page: Any) -> None:
    page = open_page(shared[1].url)
    taken = """name => { const dataTransfer = new DataTransfer();
      dataTransfer.setData("text/plain", "dragged");
      const options = {dataTransfer, bubbles: true, cancelable: true};
      return !document.getElementById("text").dispatchEvent(new DragEvent(name, options)); }"""
    assert not page.evaluate(taken, "dragover")
    assert "drop" not in (page.get_attribute("#form", "class") or "")
    assert not page.evaluate(taken, "drop")


STRANGERS = """async () => {
  const script = document.createElement("script");
  script.textContent = "window.ran = true";
  const image = new Image(), frame = document.createElement("iframe");
  image.src = "http://127.0.0.1:9/a.png";
  frame.src = "/docs";
  document.body.append(script, image, frame);
  document.body.setAttribute("style", "margin: 1px");
  await fetch("http://127.0.0.1:9/").catch(() => {});
  return window.ran === true;
}"""


def test_the_policy_stops_what_is_not_the_pages_own(shared: Any, browser: Any) -> None:
    """Without it the other tests would find no violation either."""
    page = browser.new_page()
    page.add_init_script(VIOLATIONS)
    page.goto(shared[1].url)
    assert not page.evaluate(STRANGERS)
    kinds = {"script-src-elem", "img-src", "frame-src", "style-src-attr", "connect-src"}
    all_stopped = "kinds => kinds.every(one => violations.includes(one))"
    page.wait_for_function(all_stopped, arg=sorted(kinds))
    page.close()


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
    the_key_stays_in_its_tab(page)


def the_key_stays_in_its_tab(page: Page) -> None:
    """It survives a reload of this tab; another tab of the same browser is asked again."""
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    assert page.context.cookies() == []
    assert page.evaluate("Object.values(sessionStorage)") == ["right-key"]
    page.reload()
    expect(page.locator("#model")).to_have_text("tiny-vlm")
    expect(page.locator("#key-dialog")).to_be_hidden()
    other = page.context.new_page()
    other.goto(page.url.replace("/team/vlm", "/"))
    expect(other.locator("#key-dialog")).to_be_visible()
    assert other.evaluate("sessionStorage.length") == 0
    other.close()
