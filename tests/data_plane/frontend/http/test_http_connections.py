"""Connections as clients use them: offers to upgrade, and refusals before the body is read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from foveal_runtime.frontend.http.asgi.server import GuardedProtocol, guarded
from foveal_runtime.plan.config import Admission

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CHAT = "/v1/chat/completions"
UPGRADE = (
    "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)


def head(length: int, more: str = "", path: str = CHAT) -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n"
    return f"{lines}content-type: application/json\r\n{more}\r\n".encode()


def in_segments(num_bytes: int, http: Any) -> Any:
    """The same protocol, which gets what arrives in segments of so many bytes; 0: as it comes."""

    class Segmented(GuardedProtocol):
        def data_received(self, data: bytes) -> None:
            for begin in range(0, len(data), num_bytes or len(data)):
                super().data_received(data[begin : begin + (num_bytes or len(data))])

    return functools.partial(Segmented, **http.keywords)


@asynccontextmanager
async def connected(harness: Any) -> AsyncIterator[Streams]:
    parts = urlsplit(harness.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
    """Status, headers and body of the next answer on this connection."""
    text = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(text.partition("content-length: ")[2].partition("\r\n")[0])
    return int(text.split()[1]), text, await reader.readexactly(length)


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("step", [0, 1, 7])
async def test_a_request_to_upgrade_keeps_its_body(
    start: Any, step: int, chunked: bool, close: bool
) -> None:
    """The JDK's HttpClient and curl --http2 send `Upgrade: h2c` with each request on http://: the
    body was taken for another protocol, and the application saw none."""
    http = in_segments(step, guarded(Admission()))
    async with start(http=http) as harness, connected(harness) as (reader, writer):
        body = json.dumps(harness.body("hi")).encode()
        more = UPGRADE.replace("Upgrade,", "close, Upgrade,") if close else UPGRADE
        sent = head(len(body), more) + body
        if chunked:
            sent = sent.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked", 1)
            sent = sent[: -len(body)] + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        for number in range(1 if close else 2):
            writer.write(sent)
            status, _, text = await answer(reader)
            assert status == 200, text
            assert json.loads(text)["choices"][0]["message"]["content"] == "Hello, world!"
            assert len(harness.generator.requests) == number + 1
        if close:
            assert await reader.read() == b""


async def test_pipelined_requests_to_upgrade_are_all_answered(start: Any) -> None:
    async with start(http=guarded(Admission())) as harness, connected(harness) as (reader, writer):
        body = json.dumps(harness.body("hi")).encode()
        get = f"GET /livez HTTP/1.1\r\nhost: x\r\n{UPGRADE}\r\n".encode()
        writer.write((head(len(body), UPGRADE) + body + get) * 20)
        for _ in range(20):
            assert (await answer(reader))[0] == 200
            assert (await answer(reader))[0] == 200


async def test_many_upgrades_in_one_segment_and_connect(start: Any) -> None:
    async with start(http=guarded(Admission())) as harness:
        async with connected(harness) as (reader, writer):
            one = b"GET /livez HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
            writer.write(one * 1500)
            for _ in range(1500):
                assert (await answer(reader))[0] == 200
        async with connected(harness) as (reader, writer):
            writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readline()).split()[1] in (b"400", b"404", b"405")


async def test_a_refused_body_may_arrive_and_the_connection_stays(start: Any) -> None:
    """An answer before the body counted the rest of the body as headers: 64 KiB later the
    connection was aborted, and the client lost the answer."""
    http = guarded(Admission())
    async with start(http=http) as harness, connected(harness) as (reader, writer):
        harness.app.gate.limits = Admission(max_body_bytes=1000)
        for _ in range(2):
            writer.write(head(1_000_000))
            status, text, _ = await answer(reader)
            assert (status, "connection: close" in text) == (413, False)
            for _ in range(20):
                writer.write(b"x" * 50_000)
                await writer.drain()
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("line", ["connection: close\r\n", "HTTP/1.0"])
async def test_a_refusal_that_ends_the_connection_is_read_after_the_body(
    start: Any, line: str
) -> None:
    """The connection was closed with the body unread, which resets it and loses the answer."""
    async with start(http=guarded(Admission())) as harness, connected(harness) as (reader, writer):
        harness.app.gate.limits = Admission(max_body_bytes=1000)
        sent = head(1_000_000, "" if line == "HTTP/1.0" else line)
        writer.write(sent.replace(b"HTTP/1.1", b"HTTP/1.0") if line == "HTTP/1.0" else sent)
        for _ in range(20):
            writer.write(b"x" * 50_000)
            await writer.drain()
        assert (await answer(reader))[0] == 413
        assert await reader.read() == b""


async def test_a_stream_to_an_http_1_0_client_has_no_chunks(start: Any) -> None:
    """It got their sizes among its events: HTTP/1.0 has none, a stream ends with the connection."""
    async with start(http=guarded(Admission())) as harness, connected(harness) as (reader, writer):
        body = json.dumps(harness.body("hi", stream=True)).encode()
        writer.write((head(len(body)) + body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        fields, _, text = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in fields
        assert b"connection: close" in fields
        *events, last = text.removesuffix(b"\n\n").split(b"\n\n")
        assert last == b"data: [DONE]"
        assert all(json.loads(event.removeprefix(b"data: "))["choices"] for event in events)


async def write_for_ever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0)


async def write_at_most(writer: asyncio.StreamWriter, data: bytes, times: int) -> None:
    for _ in range(times):
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize("more", ["", "connection: close\r\n"])
async def test_a_refused_body_is_not_read_for_ever(start: Any, more: str) -> None:
    """Bounded in bytes where it comes fast, in time where it does not come."""
    limits = Admission(max_body_bytes=200_000)
    for http in (guarded(limits), guarded(Admission(), drain_seconds=0.2)):
        async with start(http=http) as harness, connected(harness) as (reader, writer):
            harness.app.gate.limits = Admission(max_body_bytes=1000)
            writer.write(head(10_000_000_000, more))
            assert (await answer(reader))[0] == 413
            is_fast = http.keywords["connections"].drain_bytes == limits.max_body_bytes
            with pytest.raises(ConnectionError):
                await write_for_ever(writer, b"x" * 50_000 if is_fast else b"x")


async def test_nothing_but_line_ends_is_not_waited_for(start: Any) -> None:
    """The parser skips line ends between requests: they begin no request, but need its headers."""
    http = guarded(Admission(), header_seconds=0.2)
    async with start(http=http) as harness, connected(harness) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


async def test_a_closed_connection_leaves_nothing_to_the_collector(start: Any) -> None:
    """Long ones would wait for its oldest generation, with bodies that nobody has read."""
    gone = asyncio.Event()

    class Seen(GuardedProtocol):
        def connection_made(self, transport: Any) -> None:
            weakref.finalize(self, gone.set)
            super().connection_made(transport)

    http = functools.partial(Seen, **guarded(Admission()).keywords)
    async with start(http=http) as harness:
        gc.disable()
        try:
            async with connected(harness) as (reader, writer):
                body = json.dumps(harness.body("hi")).encode()
                writer.write(head(len(body)) + body)
                assert (await answer(reader))[0] == 200
                assert not gone.is_set()
            await asyncio.wait_for(gone.wait(), 10)
        finally:
            gc.enable()


@pytest.mark.parametrize("path", [CHAT, "/no/such/path"])
async def test_fields_behind_a_body_are_bounded(start: Any, path: str) -> None:
    """Trailers counted neither as headers nor as body: before a key was asked for, a client filled
    the memory with as many as it could send, and one value cost the square of its length."""
    for flood in (b"a: b\r\n" * 10_000, b"a: " + b"x" * 60_000):
        async with start(http=guarded(Admission())) as harness, connected(harness) as (_, writer):
            more = "transfer-encoding: chunked\r\n"
            writer.write(head(0, more, path).replace(b"content-length: 0\r\n", b""))
            writer.write(b"2\r\n{}\r\n0\r\n" + flood)
            with pytest.raises(ConnectionError):
                await write_at_most(writer, flood, 100)
            assert (await harness.http.get("/livez")).status_code == 200


async def test_fields_behind_a_body_are_not_those_of_the_request(start: Any) -> None:
    """They came behind what a gateway sets and removes: a client named itself another tenant."""
    http = guarded(Admission())
    async with (
        start(http=http, tenant_salt_header="x-tenant") as harness,
        connected(harness) as (reader, writer),
    ):
        body = json.dumps(harness.body("hi")).encode()
        sent = head(0, "transfer-encoding: chunked\r\n").replace(b"content-length: 0\r\n", b"")
        writer.write(sent + b"%x\r\n%s\r\n0\r\nx-tenant: other\r\n\r\n" % (len(body), body))
        assert (await answer(reader))[0] == 200
        assert harness.processor.seen[-1][1].tenant == b""


async def test_headers_behind_an_unanswered_request_are_bounded(start: Any) -> None:
    """While one request was answered, the headers of the next one had no end."""
    async with start(http=guarded(Admission())) as harness, connected(harness) as (_, writer):
        harness.generator.hold = asyncio.Event()
        body = json.dumps(harness.body("hi")).encode()
        writer.write(head(len(body)) + body)
        await harness.until(lambda: harness.generator.running)
        flood = b"a: b\r\n" * 10_000
        writer.write(b"GET / HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            await write_at_most(writer, flood, 100)
        await harness.until(lambda: harness.generator.aborted)
