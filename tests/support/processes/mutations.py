"""Seeded mutations of media files and of requests, for the hostile suite.

`media_cases` yields damaged files of every format that is decoded; `request_cases` yields chat and
text requests whose fields have values that no honest client sends. The same seed, the same cases.
"""

from __future__ import annotations

import base64
import copy
import io
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

IMAGES = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")
SOUNDS = ("WAV", "FLAC", "MP3")
VIDEOS = ("mp4", "webm")


@cache
def sample(kind: str) -> bytes:
    """A small honest file."""
    noise = np.random.default_rng(7).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    out = io.BytesIO()
    if kind in IMAGES:
        Image.fromarray(noise).save(out, kind)
    elif kind in SOUNDS:
        import soundfile

        wave = np.sin(np.arange(16_000) / 20).astype(np.float32)
        soundfile.write(out, wave, 16_000, format=kind)
    else:
        import av

        with av.open(out, "w", format=kind) as container:
            stream = container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=8)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for shift in range(8):
                frame = av.VideoFrame.from_ndarray(np.roll(noise, shift, 0), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    return out.getvalue()


def damaged(data: bytes, random_: random.Random) -> bytes:
    """One to six of: other bytes, bits, a cut, a piece twice, large numbers in the header."""
    out = bytearray(data)
    for _ in range(random_.randint(1, 6)):
        at = random_.randrange(max(1, len(out)))
        match random_.randrange(6):
            case 0:
                out[at : at + 1] = random_.randbytes(1)
            case 1:
                out[at : at + 8] = random_.randbytes(8)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = out[at : at + random_.randrange(1, 64)]
            case 4:
                head = random_.randrange(min(len(out) + 1, 64))
                out[head : head + 4] = random_.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4)])
            case _:
                del out[at : at + random_.randrange(1, 32)]
    return bytes(out)


def media_cases(count: int, seed: int, kinds: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """(kind, damaged file), the kinds in turn."""
    random_ = random.Random(seed)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        yield kind, damaged(sample(kind), random_)


def chat_about(data: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 1e-46, 5e-324, 1e308, 0.5, "", "a",
    "\x00", "\ud7ff", "🙂" * 50, "nan", "<image>", [], {}, [[]], [None], {"": None}, ["a"] * 300,
    {"type": "image_url"}, {"type": "text", "text": "x"}, {"url": "file:///etc/passwd"},
    {"url": "http://169.254.169.254/latest"}, {"url": "data:,"}, [0] * 5000,
)  # fmt: skip
_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "stop", "stop_token_ids", "min_tokens", "max_tokens",
    "ignore_eos", "n", "best_of", "prompt_logprobs", "logprobs", "top_logprobs", "stream",
    "stream_options", "priority", "cache_salt", "mm_processor_kwargs", "chat_template_kwargs",
    "add_special_tokens", "add_generation_prompt", "continue_final_message", "messages", "prompt",
    "model", "tools", "response_format", "echo", "suffix", "unknown_field",
    "truncate_prompt_tokens",
    "allowed_token_ids", "bad_words", "return_token_ids", "user",
)  # fmt: skip


def request_cases(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, body): an honest request with one to three fields, or parts of messages, changed."""
    random_ = random.Random(seed)
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
    for _ in range(count):
        path = random_.choice(["/v1/chat/completions"] * 3 + ["/v1/completions", "/tokenize"])
        body: dict[str, Any] = copy.deepcopy(chat) if "chat" in path else {"prompt": "hello"}
        if path != "/tokenize":
            body["max_tokens"] = 2
        for _ in range(random_.randint(1, 3)):
            if "messages" in body and random_.random() < 0.3:
                _damage_message(body, random_)
            else:
                body[random_.choice(_FIELDS)] = copy.deepcopy(random_.choice(_VALUES))
        yield path, body


def _damage_message(body: dict[str, Any], random_: random.Random) -> None:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return
    name = random_.choice(["role", "content", "name", "tool_calls", "extra"])
    messages[0][name] = copy.deepcopy(random_.choice(_VALUES))
