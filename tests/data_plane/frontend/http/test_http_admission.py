"""Admission, body limits, API keys, draining. Everything is given back."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from foveal_runtime.frontend.http.access.admin import HeldRequest
from foveal_runtime.frontend.http.access.admission import Gate
from foveal_runtime.frontend.http.access.auth import KeyFile
from foveal_runtime.frontend.http.asgi.listeners import bind_addresses, bind_tcp, bind_unix
from foveal_runtime.frontend.http.asgi.server import serve
from foveal_runtime.frontend.http.monitoring.metrics import MetricsPage
from foveal_runtime.frontend.http.monitoring.siblings import Siblings, sibling_app, socket_path
from foveal_runtime.plan.config import Admission
from foveal_runtime.plan.errors import RateLimited, StartupError

CHAT = "/v1/chat/completions"


async def test_requests_beyond_the_limit_get_429(start: Any) -> None:
    async with start(admission=Admission(max_requests=2)) as harness:
        harness.generator.hold = asyncio.Event()
        open_ones = [asyncio.create_task(harness.chat()) for _ in range(2)]
        await harness.until(lambda: len(harness.generator.running) == 2)
        refused = await harness.chat()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        harness.generator.hold.set()
        assert [r.status_code for r in await asyncio.gather(*open_ones)] == [200, 200]
        assert (await harness.chat()).status_code == 200
        assert harness.app.gate.rejections["requests"] == 1


async def test_tokens_and_media_bytes_in_flight(start: Any) -> None:
    """Counted before anything is decoded; fetched media count too, and what tokens take."""
    async with start(admission=Admission(max_tokens=100, max_media_bytes=12_000)) as harness:
        harness.generator.hold = asyncio.Event()
        first = asyncio.create_task(harness.chat("a" * 80, max_tokens=9))
        await harness.until(lambda: harness.generator.running)
        assert (await harness.chat("b" * 80, max_tokens=9)).status_code == 429
        big = await harness.http.post(CHAT, content=b" " * 11_900 + b"{}")
        assert big.status_code == 429
        harness.processor.media_bytes = 13_000
        image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
        assert (await harness.chat([image], max_tokens=9)).status_code == 429
        assert harness.app.gate.rejections == {
            "requests": 0, "uploads": 0, "tokens": 1, "scores": 0, "media_bytes": 2, "draining": 0,
        }  # fmt: skip
        harness.generator.hold.set()
        assert (await first).status_code == 200
        assert (await harness.chat([image], max_tokens=9)).status_code == 200


def test_a_request_larger_than_the_limit_is_served_alone() -> None:
    """A limit slows down; it does not make a valid request impossible."""
    gate = Gate(Admission(max_tokens=10))
    alone = gate.enter()
    alone.charge_tokens(50)
    other = gate.enter()
    with pytest.raises(RateLimited):
        other.charge_tokens(1)
    gate.check_integrity()
    alone.close()
    alone.close()
    other.charge_tokens(50)
    other.close()
    gate.check_integrity()
    other.charge_tokens(50)  # by work that has not heard of the end yet
    assert (gate.num_requests, gate.num_tokens, gate.media_bytes) == (0, 0, 0)


def test_a_declared_body_has_to_fit_beside_others() -> None:
    gate = Gate(Admission(max_media_bytes=100))
    gate.enter("a").charge_media_bytes(40)
    with pytest.raises(RateLimited, match="61 more"):
        gate.enter("b", declared_bytes=61)
    gate.enter("b", declared_bytes=60).close()
    gate.check_integrity()


async def test_bodies_beyond_the_limit_get_413(start: Any) -> None:
    """Declared or chunked; the rest is not read."""
    async with start(admission=Admission(max_body_bytes=1000)) as harness:
        declared = await harness.http.post(CHAT, content=b" " * 1001)
        assert declared.status_code == 413
        assert declared.json()["error"]["code"] == "media_too_large"

        async def pieces() -> Any:
            for _ in range(10):
                yield b" " * 200

        for path in (CHAT, "/tokenize"):
            chunked = await harness.http.post(
                path, content=pieces(), headers={"content-type": "application/json"}
            )
            assert chunked.status_code == 413


async def test_keys_are_needed_and_reloaded(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two keys\nalpha\n\nbeta\n")
    async with start(api_key_file=str(keys)) as harness:
        missing = await harness.http.get("/v1/models")
        assert missing.status_code == 401
        assert missing.headers["www-authenticate"] == "Bearer"
        assert missing.json()["error"]["code"] == "invalid_api_key"

        async def status(key: str) -> int:
            response = await harness.http.post(
                CHAT, json=harness.body(), headers={"authorization": f"Bearer {key}"}
            )
            return int(response.status_code)

        assert [await status(key) for key in ("alpha", "beta", "gamma")] == [200, 200, 401]
        for path in ("/livez", "/readyz", "/health", "/metrics", "/docs", "/openapi.json"):
            assert (await harness.http.get(path)).status_code == 200, path


class Told:
    """A CacheAdmin that notes what it was told."""

    def __init__(self) -> None:
        self.caches: list[str] = []

    async def reset_cache(self, cache: str) -> int:
        self.caches.append(cache)
        return 2

    def held_requests(self) -> list[HeldRequest]:
        return [HeldRequest(key="ab", shape="2 prompt tokens", seconds_left=3.0)]

    async def resize_ipc_cache(self, size_bytes: int) -> int:
        self.caches.append(str(size_bytes))
        return 2


async def test_administration_has_its_own_key(start: Any, tmp_path: Path) -> None:
    (tmp_path / "api").write_text("user")
    (tmp_path / "admin").write_text("root")
    admin = Told()
    files = {f"{name}_key_file": str(tmp_path / name) for name in ("api", "admin")}
    async with start(admin=admin, **files) as harness:
        for key, status in (("user", 401), ("root", 200)):
            response = await harness.http.post(
                "/reset_mm_cache", headers={"authorization": f"Bearer {key}"}
            )
            assert response.status_code == status
        assert response.json() == {"cache": "mm", "num_engines": 2}
        assert admin.caches == ["mm"]
        root = {"authorization": "Bearer root"}
        for body, status in (({"bytes": 0}, 200), ({"bytes": -1}, 400), ({"bytes": "1Gi"}, 400)):
            resized = await harness.http.post("/resize_ipc_cache", json=body, headers=root)
            assert resized.status_code == status, body
        [held] = (await harness.http.get("/quarantine", headers=root)).json()["requests"]
        assert held == {"key": "ab", "shape": "2 prompt tokens", "seconds_left": 3.0}
        user = {"authorization": "Bearer user"}
        assert (await harness.http.get("/quarantine", headers=user)).status_code == 401
        body = {"bytes": 5}
        assert (
            await harness.http.post("/resize_ipc_cache", json=body, headers=user)
        ).status_code == 401
        assert admin.caches == ["mm", "0"]
    async with start(admin=admin) as harness:
        assert (await harness.http.post("/reset_mm_cache")).status_code == 404


def test_key_file_follows_changes(tmp_path: Path) -> None:
    """A Secret volume swaps the file; a moment without keys locks nobody out."""
    path = tmp_path / "keys"
    path.write_text("old")
    now = [0.0]
    keys = KeyFile(str(path), clock=lambda: now[0])
    assert keys.accepts(b"old")

    def replace(text: str) -> None:
        (tmp_path / "next").write_text(text)
        os.replace(tmp_path / "next", path)
        now[0] += 2

    replace("# ours\n\nnew\n")
    assert keys.accepts(b"new")
    assert not any(map(keys.accepts, (b"old", b"# ours", b"ours", b"")))
    replace("")
    assert keys.accepts(b"new")
    path.unlink()
    now[0] += 2
    assert keys.accepts(b"new")
    with pytest.raises(StartupError, match="keys"):
        KeyFile(str(path))


async def test_shutdown_finishes_open_streams(start: Any, tmp_path: Path) -> None:
    """Not ready first, then 503 for new requests, open streams to their end, then the exit."""
    async with start() as harness:
        generator, app = harness.generator, harness.app
        generator.hold = asyncio.Event()
        listening = bind_tcp("127.0.0.1", 0, share=True)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        own = str(tmp_path / "own.sock")
        stop, started = asyncio.Event(), asyncio.Event()
        server = asyncio.create_task(
            serve(app, [listening], stop, own_sockets=[bind_unix(own)], started=started)
        )
        await started.wait()
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            body = harness.body("hi", stream=True)
            async with http.stream("POST", CHAT, json=body) as response:
                lines = response.aiter_lines()
                first = await anext(lines)
                assert first.startswith("data: ")
                stop.set()
                await harness.until(lambda: app.gate.draining)
                assert (await http.get("/readyz")).status_code == 503
                assert (await http.get("/livez")).status_code == 200
                refused = await http.post(CHAT, json=harness.body())
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                assert refused.headers["connection"] == "close"
                transport = httpx.AsyncHTTPTransport(uds=own)
                async with httpx.AsyncClient(transport=transport) as peer:
                    page = await peer.get("http://own/metrics")
                    assert "foveal_draining" in page.text
                generator.hold.set()
                rest = [line async for line in lines if line]
                assert rest[-1] == "data: [DONE]"
        await server
        assert generator.finished
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as late:
                await late.get(f"{url}/livez")
        app.gate.draining = False


async def test_shutdown_ends_after_the_drain_timeout(start: Any) -> None:
    """A stream that never ends cannot keep the process; its engine request is aborted."""
    async with start() as harness:
        generator, app = harness.generator, harness.app
        generator.hold = asyncio.Event()
        listening = bind_tcp("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        stop, started = asyncio.Event(), asyncio.Event()
        server = asyncio.create_task(
            serve(app, [listening], stop, drain_timeout_seconds=0.05, started=started)
        )
        await started.wait()
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            body = harness.body("hi", stream=True)
            async with http.stream("POST", CHAT, json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                stop.set()
                with pytest.raises(httpx.RemoteProtocolError):
                    async for _ in lines:
                        pass
        await server
        assert generator.aborted
        app.gate.draining = False


def test_an_address_in_use_is_a_startup_error() -> None:
    taken = bind_tcp("127.0.0.1", 0)
    with taken, pytest.raises(StartupError, match="in use"):
        bind_tcp("127.0.0.1", taken.getsockname()[1])


async def test_processes_behind_one_port_show_and_empty_each_other(
    start: Any, tmp_path: Path
) -> None:
    """`own` means the pod: a peer that asks one process gets all of them."""
    emptied: list[str] = []
    async with start() as other, start() as harness:
        path = socket_path(str(tmp_path), 1)
        stop, started = asyncio.Event(), asyncio.Event()
        other.app.service.metrics.set("foveal_media_workers", 7)
        app = sibling_app(other.app.service.metrics, lambda: emptied.append("other"))
        listening = bind_tcp("127.0.0.1", 0)
        server = asyncio.create_task(
            serve(
                other.app, [listening], stop, own_sockets=[bind_unix(path)], own_app=app,
                started=started,
            )
        )  # fmt: skip
        await started.wait()
        gone = socket_path(str(tmp_path), 2)
        siblings = Siblings([path, gone])
        page = MetricsPage(harness.app.service.metrics, (), siblings.metrics_peers)
        await harness.until(lambda: Path(path).exists())
        text = (await page.text(own=True)).decode()
        assert "foveal_media_workers{" in text
        assert " 7.0" in text
        assert await siblings.reset_processor_caches() == 1
        assert emptied == ["other"]
        stop.set()
        await server
        other.app.gate.draining = False


def test_a_kept_port_takes_no_connections() -> None:
    """The parent of several processes holds the port for them without answering on it."""
    with bind_tcp("127.0.0.1", 0, share=True, listen=False) as kept:
        port = kept.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with bind_tcp("127.0.0.1", port, share=True):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_loopback_listens_beside_another_address_only() -> None:
    """A pod's frontend listened on the pod's address alone; `kubectl port-forward` connects to
    loopback in the pod, and was refused."""
    for host, loopback, expected in (
        ("127.0.0.2", True, ["127.0.0.2", "127.0.0.1"]),
        ("127.0.0.2", False, ["127.0.0.2"]),
        ("127.0.0.1", True, ["127.0.0.1"]),
        ("0.0.0.0", True, ["0.0.0.0"]),
    ):
        with bind_tcp("127.0.0.1", 0, share=True, listen=False) as kept:
            port = kept.getsockname()[1]
            bound = bind_addresses(host, port, loopback=loopback, share=True)
        assert [one.getsockname()[0] for one in bound] == expected
        for one in bound:
            one.close()


def test_a_taken_loopback_port_is_an_error_and_leaves_nothing_open() -> None:
    with bind_tcp("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
            bind_addresses("127.0.0.2", port, loopback=True)
        bind_tcp("127.0.0.2", port).close()
