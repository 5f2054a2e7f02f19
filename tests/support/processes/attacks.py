"""What a hostile client sends: attacks by hand and generated ones, each a function of an Attacker.

`tests/processes/test_hostile.py` runs them beside a load whose answers are checked, and alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import os
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from PIL import Image

from tests.support.processes.mutations import (
    IMAGES,
    SOUNDS,
    VIDEOS,
    chat_about,
    media_cases,
    request_cases,
)

NUM_CASES = int(os.environ.get("FOVEAL_HOSTILE", "1000"))
CHAT = "/v1/chat/completions"


class Attacker:
    """Clients at another address of loopback than the load's."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self._mine = threading.local()
        self._clients: list[httpx.Client] = []
        self.statuses: Counter[int] = Counter()
        self.untyped: list[str] = []
        self._turn = 0

    @property
    def http(self) -> httpx.Client:
        """This thread's own: in a shared one, a thread may close the connection that another has
        just taken (httpcore 1.0.9, issue 1110), which looks like a lost answer."""
        if not hasattr(self._mine, "http"):
            transport = httpx.HTTPTransport(local_address="127.0.0.2")
            self._mine.http = httpx.Client(transport=transport, timeout=300)
            self._clients.append(self._mine.http)
        found: httpx.Client = self._mine.http
        return found

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def post(self, path: str, body: Any) -> int:
        self._turn += 1
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = self.urls[self._turn % len(self.urls)] + path
        headers = {"content-type": "application/json"}
        response = self.http.post(url, content=content, headers=headers)
        self.statuses[response.status_code] += 1
        if response.status_code >= 400:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                error = response.json()["error"]
                typed = all(isinstance(error[name], str) for name in ("message", "type", "code"))
                if typed and response.status_code != 500:
                    return response.status_code
            self.untyped.append(
                f"{response.status_code} {response.text[:300]} to {content[:300]!r}"
            )
        return response.status_code

    def raw(self, sent: bytes, receive_bytes: int = 0) -> socket.socket:
        self._turn += 1
        parts = urlsplit(self.urls[self._turn % len(self.urls)])
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(60)
        sock.bind(("127.0.0.2", 0))
        sock.connect((parts.hostname or "", parts.port or 0))
        sock.sendall(sent)
        return sock


def http_head(size: int) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {size}\r\n\r\n"
    ).encode()


def attack_silent_uploads(attacker: Attacker) -> None:
    """Bodies that are declared and do not come, and headers that do not end."""
    sockets = [attacker.raw(http_head(60) + b"{") for _ in range(200)]
    sockets += [attacker.raw(http_head(128 << 20) + b"{") for _ in range(16)]
    sockets += [attacker.raw(b"POST / HTTP/1.1\r\nx: y") for _ in range(100)]
    time.sleep(5)
    for sock in sockets:
        sock.close()


def attack_lists(attacker: Attacker) -> None:
    """A megabyte of entries of which each is wrong."""
    for entry in (b"{}", b"-1", b"[[]]"):
        many = b",".join([entry] * (900_000 // (len(entry) + 1)))
        assert attacker.post(CHAT, b'{"messages":[' + many + b"]}") == 400
        assert attacker.post("/v1/completions", b'{"prompt":[' + many + b"]}") == 400
        assert attacker.post("/detokenize", b'{"tokens":[' + many + b"]}") == 400


def attack_depth(attacker: Attacker) -> None:
    """JSON and template arguments that are nested without end."""
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    message = [{"role": "user", "content": "hi"}]
    for body in (
        b'{"messages":' + b"[" * 1_000_000,
        {"messages": message, "chat_template_kwargs": {"x": deep}},
        {"messages": message, "mm_processor_kwargs": {"x": deep}},
        {"messages": message, "x": deep},
    ):
        assert attacker.post(CHAT, body) == 400


def attack_long_texts(attacker: Attacker) -> None:
    """Four megabytes of text to everything that tokenises."""
    text = "all the words that there are " * 140_000
    assert attacker.post("/tokenize", {"prompt": text}) == 400
    assert attacker.post("/v1/completions", {"prompt": text}) == 400
    assert attacker.post(CHAT, {"messages": [{"role": "user", "content": text}]}) == 400
    assert attacker.post("/detokenize", {"tokens": [5] * 900_000}) == 400


def attack_options(attacker: Attacker) -> None:
    """Options that make a small picture large, and unknown ones."""
    image = Image.fromarray(np.zeros((64, 64, 3), np.uint8))
    for number, options in enumerate((
        {"size": {"shortest_edge": 8000}}, {"crop_size": {"height": 9000, "width": 9000}},
        {"do_resize": False}, {"do_center_crop": True}, {"no_such_option": 1}, {"resample": "x"},
    )):  # fmt: skip
        image.putpixel((number, 0), (255, 0, 0))
        out = io.BytesIO()
        image.save(out, "PNG")
        body = chat_about(out.getvalue()) | {"mm_processor_kwargs": options}
        assert attacker.post(CHAT, body) == 400, options


def attack_bombs(attacker: Attacker) -> None:
    """Pictures whose headers promise more than anybody should decode."""
    for side in (20_000, 100_000, 2**31 - 1):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")]
        data = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
            for name, body in chunks
        )
        assert attacker.post(CHAT, chat_about(data)) in (400, 413)


def attack_templates(attacker: Attacker) -> None:
    """Conversations that cost a chat template more than their bytes, and its variables."""
    words = {"role": "user", "content": "word " * 60}
    turns = [words, {"role": "assistant", "content": "yes"}] * 4000
    variables = {f"v{i}": ["x" * 100] * 30 for i in range(250)}
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4000}] * 10
    for path in (CHAT, "/tokenize"):
        assert attacker.post(path, {"messages": turns}) == 400
        assert attacker.post(path, {"messages": parts}) == 400
        small = {"messages": turns[:2], "chat_template_kwargs": variables}
        assert attacker.post(path, small | ({"max_tokens": 1} if path == CHAT else {})) == 200


def attack_scores(attacker: Attacker) -> None:
    """Every log probability that may be asked for, of many choices, streamed or not, at once."""
    hi = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "logprobs": True}
    assert attacker.post(CHAT, hi | {"n": 64, "max_tokens": 2000, "top_logprobs": 20}) == 400
    asked = {"n": 16, "max_tokens": 64, "top_logprobs": 20}
    bodies = [hi | asked | {"stream": stream} for stream in (False, True)]
    prompt = {"prompt": [7] * 400, "prompt_logprobs": 20, "max_tokens": 1, "n": 8}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda body: attacker.post(CHAT, body), bodies * 3))
        found += pool.map(lambda body: attacker.post("/v1/completions", body), [prompt] * 3)
    assert set(found) <= {200, 429}


def attack_numbers(attacker: Attacker) -> None:
    """Sampling parameters at the edge of floating point."""
    for field in ("temperature", "top_p", "min_p", "repetition_penalty"):
        for value in (1e-46, 5e-324, 1e-5, 0):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, field: value}
            assert attacker.post(CHAT, body) in (200, 400)


def attack_hang_ups(attacker: Attacker) -> None:
    """Clients that leave in the middle of their body, or of the answer."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 200,
         "ignore_eos": True}
    ).encode()  # fmt: skip
    for number in range(40):
        sock = attacker.raw(http_head(len(body)) + (body if number % 2 else body[:-5]))
        if number % 2:
            sock.recv(100)
        sock.close()


def attack_slow_readers(attacker: Attacker) -> None:
    """Answers that nobody reads."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 16, "logprobs": True,
         "top_logprobs": 20, "max_tokens": 100, "ignore_eos": True}
    ).encode()  # fmt: skip
    sockets = [attacker.raw(http_head(len(body)) + body, 4096) for _ in range(4)]
    time.sleep(5)
    for sock in sockets:
        sock.close()


def attack_with_media(attacker: Attacker) -> None:
    """Damaged files of every format, all sent as pictures."""
    cases = media_cases(NUM_CASES, 20261122, (*IMAGES, *SOUNDS, *VIDEOS))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda case: attacker.post(CHAT, chat_about(case[1], case[0])), cases))


def attack_with_requests(attacker: Attacker) -> None:
    """Requests whose fields have values of other kinds and sizes."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda case: attacker.post(*case), request_cases(NUM_CASES, 16)))


ATTACKS: tuple[Callable[[Attacker], None], ...] = (
    attack_silent_uploads, attack_lists, attack_depth, attack_long_texts, attack_options,
    attack_bombs, attack_templates, attack_scores, attack_numbers, attack_hang_ups,
    attack_slow_readers, attack_with_media, attack_with_requests,
)  # fmt: skip


def attack_largest_body(attacker: Attacker) -> None:
    """All the bytes that a body may have: in one medium, in texts, and in nothing."""
    most = (128 << 20) - 1000
    assert attacker.post(CHAT, b" " * most + b"{}") == 400
    media = b"data:image/png;base64," + b"A" * (most // 4 * 4)
    for text in (media, b"text " * (most // 5), b"\\n" * (most // 2), b"\xc3\xa9" * (most // 2)):
        part = b'{"type":"image_url","image_url":{"url":"' + text + b'"}}'
        if text is not media:
            part = b'{"type":"text","text":"' + text + b'"}'
        body = b'{"messages":[{"role":"user","content":[' + part + b"]}]}"
        assert attacker.post(CHAT, body) in (400, 413)


def attack_many_ids(attacker: Attacker) -> None:
    """As many numbers as a body may have, all valid, and as much else."""
    for value, num in ((b"[1]", 190_000), (b'{"a":1}', 140_000), (b'"word"', 140_000)):
        many = b",".join([value] * num)
        assert attacker.post("/v1/completions", b'{"prompt":[' + many + b"]}") == 400
    ids = b",".join([b"5"] * 999_000)
    assert attacker.post("/v1/completions", b'{"prompt":[' + ids + b"]}") == 400
    assert attacker.post("/detokenize", b'{"tokens":[' + ids + b"]}") == 400
    lists = b",".join([b"[" + b",".join([b"5"] * 15_000) + b"]"] * 64)
    assert attacker.post("/v1/completions", b'{"prompt":[' + lists + b"]}") == 400
    assert attacker.post("/v1/embeddings", b'{"input":[' + lists + b"]}") in (400, 404)


def attack_many_parts(attacker: Attacker) -> None:
    """As many messages, parts and calls as are taken."""
    part = {"type": "text", "text": "x"}
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    user = {"role": "user", "content": "x"}
    for messages in (
        [{"role": "user", "content": [part] * 4000}] * 2,
        [{"role": "user", "content": "x"}] * 8000,
        [user, *[{"role": "assistant", "content": "", "tool_calls": [call] * 1000}] * 100],
    ):
        assert attacker.post(CHAT, {"messages": messages, "max_tokens": 1}) in (200, 400)


def attack_many_tools(attacker: Attacker) -> None:
    """Tools whose schemas are as large as is taken, and as long as their words may be."""
    hi = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for schema, words in (
        ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(250)}}, 100),
        ({"enum": ["x"] * 40_000}, 100),
        ({"type": "object"}, 1_000_000),
    ):
        function = {"description": "word " * (words // 5), "parameters": schema}
        tools = [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(20)]
        assert attacker.post(CHAT, hi | {"tools": tools}) in (200, 400)


ALONE: tuple[Callable[[Attacker], None], ...] = (
    attack_largest_body, attack_many_ids, attack_many_parts, attack_many_tools,
)  # fmt: skip
"""What takes long to make or send, and so is not sent beside the load."""
