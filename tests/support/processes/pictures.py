"""Requests over seeded pictures, for tests that compare answers with each other."""

from __future__ import annotations

import base64
from typing import Any

from tests.support.media_files import png


def data_url(seed: int, side: int = 48) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed, side, side)).decode()


def question(seed: int, uuid: str = "", *, with_url: bool = True) -> dict[str, Any]:
    """A chat request about picture `seed`; with `uuid` alone when `with_url` is False."""
    part: dict[str, Any] = {"type": "image_url", "image_url": None}
    if with_url:
        part["image_url"] = {"url": data_url(seed)}
    if uuid:
        part["uuid"] = uuid
    text = {"type": "text", "text": "What is in this picture, and where? Name every shape you see."}
    return {
        "model": "tiny-vlm",
        "messages": [{"role": "user", "content": [part, text]}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
    }


def answer_of(response: Any) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])
