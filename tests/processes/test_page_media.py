"""Sound and video on the chat page, in a real browser against real processes of tiny models.

Their weights are random, so what they write means nothing; but it is what the same model answers
to the same file over the API. The microphone is Chromium's own stand-in, which plays a file.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.support.media_files import mp4, tone
from tests.support.models.tiny_media import save_tiny_audio, save_tiny_video
from tests.support.processes.chat_page import (
    MARKS,
    ask,
    bring,
    browser,
    figure,
    open_page,
    whole_answer,
)

__all__ = ["browser", "open_page"]
pytestmark = MARKS
HEARD_HERTZ = 600.0
_SOUND = Path(tempfile.gettempdir()) / f"foveal-page-microphone-{os.getpid()}.wav"
BROWSER_FLAGS = [
    "--use-fake-device-for-media-stream",
    f"--use-file-for-fake-audio-capture={_SOUND}",
]


@pytest.fixture(scope="module", autouse=True)
def microphone() -> Iterator[None]:
    """What Chromium's stand-in plays, again and again."""
    _SOUND.write_bytes(tone(HEARD_HERTZ, 2.0, 48000))
    yield
    _SOUND.unlink()


@pytest.fixture(scope="module")
def serve(
    deployment_of: Any, start_seconds: float, asker_for: Any, tmp_path_factory: Any
) -> Iterator[Callable[..., Any]]:
    started = []

    def run(name: str, save: Callable[[Path], None]) -> Any:
        path = tmp_path_factory.mktemp("models") / name
        save(path)
        deployment = deployment_of(model=str(path), name=name)
        started.append(deployment)
        deployment.start()
        deployment.wait_ready(start_seconds)
        return asker_for(deployment.frontends[0].url)

    yield run
    for one in started:
        one.stop(10)


@pytest.fixture(scope="module")
def listener(serve: Any) -> Any:
    return serve("tiny-audio", save_tiny_audio)


@pytest.fixture(scope="module")
def watcher(serve: Any) -> Any:
    return serve("tiny-video", save_tiny_video)


def answer_of_api(asker: Any, model: str, kind: str, url: str, text: str) -> str:
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    message = {"role": "user", "content": [part, {"type": "text", "text": text}]}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 24}
    found = asker.http.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


def greedy(page: Page) -> None:
    page.get_by_text("Options").click()
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "24")


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_what_is_recorded_is_what_the_microphone_heard(listener: Any, open_page: Any) -> None:
    sent: list[str] = []
    page = open_page(listener.url, permissions=["microphone"])
    page.on("request", lambda one: one.post_data and sent.append(one.post_data))
    record = page.locator("#record")
    expect(record).to_have_text("Record")
    expect(record).to_have_attribute("aria-pressed", "false")
    greedy(page)
    record.click()
    expect(record).to_have_text("Stop recording")
    expect(record).to_have_attribute("aria-pressed", "true")
    page.wait_for_timeout(1500)
    record.click()
    expect(page.locator("#chips figure")).to_contain_text("recording.wav")
    expect(record).to_have_text("Record")
    expect(record).to_be_focused()
    said = ask(page, "what is it?")
    url = json.loads(sent[-1])["messages"][0]["content"][0]["audio_url"]["url"]
    assert said == answer_of_api(listener, "tiny-audio", "audio", url, "what is it?")
    assert figure(page, "IPC cache").startswith("0 of 1 held")
    with wave.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16000)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)
    assert 0.5 < len(samples) / 16000 < 60
    strongest = np.abs(np.fft.rfft(samples)).argmax() * 16000 / len(samples)
    assert abs(strongest - HEARD_HERTZ) < 20, "this is not what was heard"
    player = page.locator("article.user audio")
    expect(player).to_have_attribute("aria-label", "recording.wav")
    assert page.evaluate("document.querySelector('article.user audio').duration") > 0.5


def test_a_microphone_that_is_not_given_is_said(listener: Any, open_page: Any) -> None:
    page = open_page(listener.url)
    page.click("#record")
    expect(page.locator("#note")).to_have_text("The browser gives no access to a microphone.")
    expect(page.locator("#record")).to_have_text("Record")


def test_dropped_sounds_are_answered_as_over_the_api(listener: Any, open_page: Any) -> None:
    page = open_page(listener.url)
    expect(page.locator("#limits")).to_contain_text("× audio (")
    greedy(page)
    texts = []
    for hertz in (200.0, 900.0):
        data = tone(hertz)
        bring(page, "drop", f"{hertz:g}.wav", "audio/wav", data)
        expect(page.locator("#chips figure")).to_contain_text(f"{hertz:g}.wav")
        texts.append(ask(page, "what is here?"))
        url = data_url("audio/wav", data)
        assert texts[-1] == answer_of_api(listener, "tiny-audio", "audio", url, "what is here?")
        page.click("#fresh")
    assert texts[0] != texts[1], "it hears nothing"


def test_a_video_is_shown_and_answered_as_over_the_api(watcher: Any, open_page: Any) -> None:
    page = open_page(watcher.url)
    expect(page.locator("#limits")).to_contain_text("× video (")
    greedy(page)
    texts = []
    for shade in (0, 120):
        data = mp4(8, rate=8, size=(64, 48), first=shade, step=20)
        bring(page, "drop", f"clip-{shade}.mp4", "video/mp4", data)
        texts.append(ask(page, "what is it?"))
        url = data_url("video/mp4", data)
        assert texts[-1] == answer_of_api(watcher, "tiny-video", "video", url, "what is it?")
        player = page.locator("article.user video")
        expect(player).to_have_attribute("aria-label", f"clip-{shade}.mp4")
        expect(player).to_have_attribute("controls", "")
        if not shade:  # again: nothing is sent
            page.fill("#text", "is it two?")
            page.press("#text", "Enter")
            whole_answer(page, 1)
            assert figure(page, "Upload").startswith("0 B")
            assert figure(page, "IPC cache").startswith("1 of 1 held")
        page.click("#fresh")
    assert texts[0] != texts[1], "it sees nothing"
