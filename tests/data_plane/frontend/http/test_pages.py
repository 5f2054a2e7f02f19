"""The HTML pages at / and /docs, and what the API tells the chat page."""

from __future__ import annotations

import base64
import hashlib
import re
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
