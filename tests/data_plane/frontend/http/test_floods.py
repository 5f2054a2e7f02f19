"""What a client can do to a frontend before its request is read: stalls, floods, shapes of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from foveal_runtime.frontend.http.access.admission import Gate
from foveal_runtime.frontend.http.asgi.server import Connections, guarded
from foveal_runtime.frontend.http.service import Service
from foveal_runtime.frontend.protocol.anthropic import CountTokensRequest
from foveal_runtime.frontend.protocol.openai_responses import ResponsesRequest
from foveal_runtime.frontend.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from foveal_runtime.frontend.testing.fake_tokenizer import byte_tokenizer
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.config import Admission
from foveal_runtime.plan.errors import ContextLengthExceeded, RateLimited

CHAT = "/v1/chat/completions"
HEAD = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


class Attacker:
    """Raw connections from another loopback address than the tests' honest clients have."""

    def __init__(self, url: str, address: str = "127.0.0.2") -> None:
        parts = urlsplit(url)
        self.target = (parts.hostname or "", parts.port or 0)
        self.address = address
        self.links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self, sent: bytes, buffer_bytes: int = 0) -> asyncio.StreamReader:
        sock = socket.socket()
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.bind((self.address, 0))
        sock.connect(self.target)
        sock.setblocking(False)
        limit = buffer_bytes or 1 << 16
        self.links.append(await asyncio.open_connection(sock=sock, limit=limit))
        self.links[-1][1].write(sent)
        return self.links[-1][0]

    async def upload(self, declared: int, sent: bytes, path: str = CHAT) -> asyncio.StreamReader:
        return await self.open(HEAD.format(path, declared).encode() + sent)

    async def close(self) -> None:
        for _, writer in self.links:
            writer.close()


async def drained(reader: asyncio.StreamReader) -> None:
    """Reads until the server has closed the connection, in whatever way."""
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(1 << 16):
            pass


async def test_silent_uploads_keep_nobody_out(start: Any) -> None:
    """Four connections that declared 128 MiB and sent a byte, or as many as there are places that
    declared 60, turned every other POST away for as long as they stayed."""
    limits = Admission(max_requests=8, max_media_bytes=1 << 20, max_body_bytes=1 << 20)
    async with start(admission=limits) as harness:
        attacker = Attacker(harness.url)
        for _ in range(4):
            await attacker.upload(60, b"{")
        readers = [await attacker.upload(1 << 20, b"{") for _ in range(4)]
        answers = [await reader.readuntil(b"\r\n") for reader in readers]
        assert all(b" 429 " in answer for answer in answers), "its share of eight places is four"
        assert harness.app.gate.media_bytes == 4
        assert (await harness.chat()).status_code == 200
        await attacker.close()
        await harness.until(lambda: not harness.app.gate.num_uploads)


async def test_a_share_of_bytes_for_each_address() -> None:
    """One address could fill the bytes of the process with bodies that never end."""
    gate = Gate(Admission(max_media_bytes=100))
    first, second, other = gate.enter("a"), gate.enter("a"), gate.enter("b")
    first.charge_media_bytes(40)
    with pytest.raises(RateLimited, match="from this address"):
        second.charge_media_bytes(20)
    other.charge_media_bytes(20)
    other.admit()
    other.charge_media_bytes(30)  # fetched media of a complete request have no such share
    gate.check_integrity()
    for ticket in (first, second, other):
        ticket.close()
    gate.check_integrity()
    assert gate.media_bytes == gate.num_requests == gate.num_uploads == 0


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_slow_body_ends_with_408(start: Any, path: str) -> None:
    """There was no deadline on bodies."""
    limits = Admission(upload_window_seconds=0.2, min_upload_bytes_per_second=100)
    async with start(admission=limits) as harness:
        attacker = Attacker(harness.url)
        reader = await attacker.upload(1000, b"{")
        answer = await reader.readuntil(b"}}")
        assert b" 408 " in answer
        assert b"upload_too_slow" in answer
        assert harness.app.gate.num_uploads == 0
        await attacker.close()


async def test_readiness_knows_of_uploads_that_take_every_place(start: Any) -> None:
    async with start(admission=Admission(max_requests=2)) as harness:
        attackers = [Attacker(harness.url, name) for name in ("127.0.0.2", "127.0.0.3")]
        for attacker in attackers:
            await attacker.upload(60, b"{")
        await harness.until(lambda: harness.app.gate.num_uploads == 2)
        ready = await harness.http.get("/readyz")
        assert ready.status_code == 503
        assert "still arriving" in ready.json()["detail"]
        assert (await harness.http.get("/livez")).status_code == 200
        for attacker in attackers:
            await attacker.close()


async def test_hanging_up_is_no_error_of_the_server(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that left in the middle of its body was a 500, a log with a traceback, an alert."""
    caplog.set_level(logging.DEBUG)
    async with start() as harness:
        attacker = Attacker(harness.url)
        await attacker.upload(1000, b'{"messages"')
        await harness.until(lambda: harness.app.gate.num_uploads)
        await attacker.close()
        await harness.until(lambda: not harness.app.gate.num_uploads)
        harness.generator.hold = asyncio.Event()
        body = json.dumps(harness.body("hi")).encode()
        leaver = Attacker(harness.url)
        await leaver.upload(len(body), body)
        await harness.until(lambda: harness.generator.running)
        await leaver.close()
        await harness.until(lambda: not harness.app.gate.num_requests)
        streamed = json.dumps(harness.body("hi", stream=True)).encode()
        leaver = Attacker(harness.url)
        await (await leaver.upload(len(streamed), streamed)).readuntil(b"data: ")
        await leaver.close()
        await harness.until(lambda: not harness.app.gate.num_requests)
        page = (await harness.http.get("/metrics")).text
    counted = [line.split() for line in page.splitlines() if not line.startswith("#")]
    errors = [name for name, value in counted if float(value) and (
        "5xx" in name or name.startswith("foveal_request_errors"))]  # fmt: skip
    assert errors == []
    assert any(n.startswith("foveal_client_disconnects") and v == "3.0" for n, v in counted)
    told = [r for r in caplog.records if getattr(r, "fields", {}).get("error")]
    assert [r.fields["error"] for r in told] == ["client_disconnect"] * 3  # type: ignore[attr-defined]
    assert {r.levelno for r in told} == {logging.DEBUG}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_headers_have_a_deadline_and_a_size(start: Any) -> None:
    """A connection without a complete request line stayed for ever, and headers had no end."""
    async with start(http=guarded(Admission(), header_seconds=0.2)) as harness:
        attacker = Attacker(harness.url)
        assert await (await attacker.open(b"")).read() == b""
        assert await (await attacker.open(b"POST / HTTP/1.1\r\nx: y")).read() == b""
        large = await attacker.open(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)
        await drained(large)
        assert (await harness.http.get("/livez")).status_code == 200
        await attacker.close()


async def test_a_slow_reader_is_cut_off(start: Any) -> None:
    """A client that read nothing kept its request and its buffers for as long as it liked."""
    http = guarded(Admission(write_timeout_seconds=0.3))
    async with start(http=http) as harness:
        harness.say[0] = "x" * 3000
        body = json.dumps(
            harness.body("hi", stream=True, n=64, max_tokens=3000, logprobs=True, top_logprobs=20)
        ).encode()
        attacker = Attacker(harness.url)
        reader = await attacker.open(HEAD.format(CHAT, len(body)).encode() + body, 4096)
        await harness.until(lambda: len(harness.generator.aborted) == 64)
        await drained(reader)
        assert http.keywords["connections"].num_slow_readers == 1
        await attacker.close()


def test_connections_have_a_share_for_each_address() -> None:
    book = Connections(Admission(client_share=0.5))
    book.limit, book.client_limit = 4, 2
    assert [book.take("a") for _ in range(3)] == [True, True, False]
    assert [book.take(name) for name in "bcd"] == [True, True, False]
    book.release("a")
    assert book.take("d")
    assert book.num_refused == 2


MANY = 50_000
BIASES = dict.fromkeys(map(str, range(MANY)), "")
MESSAGE = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": [[-1]] * MANY}),
        (ChatCompletionRequest, {"messages": [{}] * MANY}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatCompletionRequest, {"messages": MESSAGE, "stop": [""] * MANY}),
        (ChatCompletionRequest, {"messages": MESSAGE, "logit_bias": BIASES}),
        (ChatCompletionRequest, {"messages": MESSAGE, **{f"f{i}": 1 for i in range(MANY)}}),
        (TokenizeRequest, {f"f{i}": 1 for i in range(MANY)}),
        (DetokenizeRequest, {"tokens": [""] * MANY}),
        (ChatCompletionRequest, {"messages": MESSAGE, "chat_template_kwargs": {"a": [1] * MANY}}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)  # fmt: skip
def test_validation_stops_at_the_first_of_many_errors(model: Any, body: Any) -> None:
    """0.9 MB of invalid entries took 9.8 s and 445 MB: one message was written for each."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 10


async def test_json_is_bounded_in_depth_and_values(start: Any) -> None:
    """Deep arguments of a chat template were a 500."""
    async with start() as harness:
        deep: Any = 1
        for _ in range(400):
            deep = {"a": deep}
        for field in ("chat_template_kwargs", "mm_processor_kwargs"):
            refused = await harness.chat("hi", **{field: {"x": deep}})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == field
        nested = b'{"messages":' + b"[" * 100_000
        values = b'{"prompt":[' + b"1," * 1_000_001 + b"1]}"
        lists = b'{"prompt":[' + b"[]," * 200_000 + b"[]]}"
        for body in (nested, values, lists):
            refused = await harness.http.post(CHAT, content=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value", "obeyed"),
    [
        ("temperature", 1e-46, 0.0),
        ("temperature", 5e-324, 0.0),
        ("temperature", -0.0, 0.0),
        ("temperature", 0.5, 0.5),
        ("top_p", 1e-46, 1e-6),
        ("min_p", 1e-46, 1e-46),
        ("repetition_penalty", 1e-46, None),
        ("temperature", "nan", None),
    ],
)
async def test_numbers_at_the_edge_of_floats(
    start: Any, field: str, value: Any, obeyed: float | None
) -> None:
    """A temperature of 1e-46 is 0 in 32 bits: logits were divided by it."""
    async with start() as harness:
        response = await harness.chat("hi", **{field: value})
        if obeyed is None:
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field
        else:
            assert response.status_code == 200, response.text
            assert getattr(harness.generator.requests[0].sampling, field) == obeyed


def test_long_texts_are_refused_before_they_are_tokenised() -> None:
    """A megabyte of text was tokenised whole, and only then refused by length."""
    tokenizer = TextTokenizer(byte_tokenizer())
    text = "a" * 2_000_000
    said = "prompt is too long: it has 2000000 characters, and its first 32768 are more than 1000"
    with pytest.raises(ContextLengthExceeded, match=said):
        tokenizer.encode(text, add_special_tokens=False, limit=1000)
    assert len(tokenizer.encode(text, add_special_tokens=False, limit=2_000_000)) == 2_000_000


async def test_all_text_of_a_request_counts(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 prompts that were short each, and refusals of earlier answers, were tokenised on the event
    loop, and refusals had no limit."""
    num_threaded = 0
    in_thread = Service.in_thread

    async def counted(self: Service, work: Any) -> Any:
        nonlocal num_threaded
        num_threaded += 1
        return await in_thread(self, work)

    monkeypatch.setattr(Service, "in_thread", counted)
    refusal = {"type": "refusal", "refusal": "a" * 30_000}
    async with start() as harness:
        harness.generator.context_tokens = 100_000
        prompts = ["a" * 15_000] * 2
        body = {"prompt": prompts, "max_tokens": 1}
        assert (await harness.http.post("/v1/completions", json=body)).status_code == 200
        assert num_threaded == 2
        said = [{"role": "assistant", "content": [refusal]}, {"role": "user", "content": "hi"}]
        answer = await harness.http.post(CHAT, json={"messages": said, "max_tokens": 1})
        assert answer.status_code == 200
        assert num_threaded == 3
        said[0]["content"] = [refusal | {"refusal": "a" * 9_000_000}] * 2
        answer = await harness.http.post(CHAT, json={"messages": said})
        assert answer.status_code == 400
        assert "characters; at most 16000000" in answer.json()["error"]["message"]


async def test_scores_of_a_prompt_are_bounded(start: Any) -> None:
    """A message of 75 MiB of prompt logprobs ended the sessions of everybody."""
    async with start() as harness:
        harness.generator.context_tokens = 40_000
        for field, body in (("n", {"n": 8}), ("alternatives", {"n": 1})):
            few = {"prompt": [97] * 20_000, "prompt_logprobs": 0 if field == "n" else 20, **body}
            fits = harness.http.post("/v1/completions", json={**few, "max_tokens": 1})
            status = (await fits).status_code
            assert status == (200 if field == "n" else 400), field
        many = {"prompt": [97] * 20_000, "prompt_logprobs": 1, "n": 8, "max_tokens": 1}
        refused = await harness.http.post("/v1/completions", json=many)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"


async def test_token_endpoints_pass_admission_and_are_bounded(start: Any) -> None:
    """4 MB sent to /tokenize took 41 s and 900 MB beside the limits of the process."""
    async with start(admission=Admission(max_tokens=1000)) as harness:
        harness.generator.hold = asyncio.Event()
        open_one = asyncio.create_task(harness.chat("a" * 900))
        await harness.until(lambda: harness.generator.running)
        for path, body in (
            ("/tokenize", {"prompt": "a" * 200}),
            ("/detokenize", {"tokens": [97] * 200}),
        ):
            refused = await harness.http.post(path, json=body)
            assert refused.status_code == 429, path
        harness.generator.hold.set()
        await open_one
        for path, body in (
            ("/tokenize", {"prompt": "a" * 1_000_000}),
            ("/detokenize", {"tokens": [97] * 100_000}),
            ("/v1/completions", {"prompt": "a" * 1_000_000}),
            ("/v1/completions", {"prompt": [97] * 100_000}),
        ):
            refused = await harness.http.post(path, json=body)
            assert refused.status_code == 400, path
            assert refused.json()["error"]["code"] == "context_length_exceeded"
        harness.app.gate.draining = True
        assert (await harness.http.post("/tokenize", json={"prompt": "a"})).status_code == 503
        harness.app.gate.draining = False


@pytest.mark.parametrize("request_type", [ChatCompletionRequest, TokenizeRequest])
def test_parts_of_all_messages_together_are_bounded(request_type: Any) -> None:
    """60 messages of 1,000 parts held everybody up for 166 ms."""
    part = {"type": "text", "text": "x"}
    few = [{"role": "user", "content": [part] * 1000}] * 10
    assert len(request_type.model_validate({"messages": few}).messages) == 10
    with pytest.raises(ValidationError, match="11000 parts; at most 10000"):
        request_type.model_validate({"messages": [*few, few[0]]})


RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}] * 9}
REASONING = {"type": "reasoning", "summary": [{"text": "x"}] * 1000}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [
    {"type": "input_text", "text": "x"}] * 1000}  # fmt: skip


@pytest.mark.parametrize(
    ("request_type", "field", "many"),
    [
        (
            CountTokensRequest,
            "messages",
            {"role": "user", "content": [RESULT["content"][0]] * 1000},
        ),
        (CountTokensRequest, "messages", {"role": "user", "content": [RESULT] * 100}),
        (ResponsesRequest, "input", {"role": "user", "content": [OUTPUT["output"][0]] * 1000}),
        (ResponsesRequest, "input", OUTPUT),
        (ResponsesRequest, "input", REASONING),
    ],
)
def test_parts_are_bounded_at_the_other_doors(request_type: Any, field: str, many: Any) -> None:
    assert request_type.model_validate({field: [many] * 10})
    with pytest.raises(ValidationError, match="11000 parts; at most 10000"):
        request_type.model_validate({field: [many] * 11})
