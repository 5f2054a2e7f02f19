"""The HTML pages at / and /docs, and what the API tells the chat page."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest

PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_only_the_pages_own_script_and_style_may_run(harness: Any, path: str) -> None:
    response = await harness.http.get(path)
    assert response.status_code == 200
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    for kind in ("script", "style"):
        (code,) = re.findall(rf"<{kind}>(.*?)</{kind}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    # A page that the policy would break: handlers and styles in attributes, other hosts.
    assert not re.findall(r"\son\w+=|\sstyle=|(?:src|href)=[\"']?(?:https?:)?//", response.text)
    assert "innerHTML" not in response.text


class Controls(HTMLParser):
    """What a screen reader calls each control of a page: (tag and id, name)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[list[str]] = []
        self._labels: dict[str, str] = {}
        self._label = self._text = ""
        self._open: list[int] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "label":
            self._label, self._text = given.get("for") or "", ""
        if tag in ("button", "input", "textarea", "summary", "dialog", "nav", "main", "form"):
            by = self._labels.get(given.get("aria-labelledby") or "", "")
            name = given.get("aria-label") or by or self._labels.get(given.get("id") or "", "")
            self.found.append([f"{tag}#{given.get('id')}", name or self._text])
            if tag in ("button", "summary"):
                self._open.append(len(self.found) - 1)

    def handle_data(self, data: str) -> None:
        self._text += data.strip()
        for index in self._open:
            self.found[index][1] += data.strip()

    def handle_endtag(self, tag: str) -> None:
        if tag in ("button", "summary"):
            self._open.pop()
        if tag == "label":
            self._labels[self._label], self._text = self._text, ""


async def test_a_screen_reader_finds_a_name_for_every_control(harness: Any) -> None:
    page = (await harness.http.get("/")).text
    controls = Controls(page).found
    assert len(controls) > 12
    inner = {"form#key-form", "dialog#key-dialog"}  # named by what stands in them
    assert [one for one, name in controls if not name and one not in inner] == []
    assert 'lang="en"' in page
    for live in ('id="log" role="log" aria-live="polite"', 'id="note" role="status"'):
        assert live in page, "what changes is said"
    assert "color-scheme: light dark" in page
    assert 'name="viewport" content="width=device-width' in page


async def test_the_chat_page_can_be_switched_off(start: Any) -> None:
    async with start(page=False) as harness:
        assert (await harness.http.get("/")).status_code == 404
        assert (await harness.http.get("/docs")).status_code == 200


async def test_the_model_card_gives_the_limits_of_what_the_model_takes(harness: Any) -> None:
    (card,) = (await harness.http.get("/v1/models")).json()["data"]
    image = card["modalities"]["image"]
    limits = harness.app.service.config.modalities.image
    assert image["max_per_prompt"] == limits.max_per_prompt
    assert image["max_bytes"] == limits.max_bytes
    assert image["max_pixels"] == limits.max_pixels
    assert image["max_seconds"] is None


async def test_the_last_chunk_says_what_the_caches_saved(harness: Any) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    for asked in (True, False):
        options = {"include_usage": True, "include_cache_usage": asked}
        events = await harness.stream(**harness.body(content), stream_options=options)
        usage = events[-1]["usage"]
        assert ("cache" in usage) == asked
        if asked:
            (item,) = usage["cache"]["items"]
            assert item["modality"] == "image"
            assert item.keys() == {"modality", "bytes", "processed", "sent"}
            assert usage["cache"]["prefill_seconds"] >= 0
        asked_of_text = {"prompt": ["a", "b"], "stream_options": options}
        usage = (await harness.stream("/v1/completions", **asked_of_text))[-1]["usage"]
        assert ("cache" in usage) == asked
        if asked:
            assert usage["cache"]["items"] == []
            assert usage["cache"]["queue_seconds"] >= 0
