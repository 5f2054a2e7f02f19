"""A real server on loopback in front of the fakes: what every HTTP test starts from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from foveal_runtime.frontend.http.app import HttpApp, build_app
from foveal_runtime.frontend.testing.fake import FakeGenerator, FakeInputProcessor
from foveal_runtime.frontend.testing.fake_tokenizer import AUDIO, EOS, IMAGE, VIDEO, byte_tokenizer
from foveal_runtime.plan.config import FrontendConfig, ModelConfig

CHAT = "/v1/chat/completions"
TOKENIZER = byte_tokenizer()


async def until(condition: Callable[[], Any]) -> None:
    """Waits for a condition that other tasks bring about; the test's timeout is the bound."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@dataclass
class Harness:
    """`say` is the text of every answer; the fakes are open to the test."""

    app: HttpApp
    generator: FakeGenerator
    processor: FakeInputProcessor
    url: str
    http: httpx.AsyncClient
    say: list[str] = field(default_factory=lambda: ["Hello, world!"])

    def body(self, text: Any = "hi", **more: Any) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}

    until = staticmethod(until)

    @property
    def prompt(self) -> str:
        """The text that the last request was rendered to."""
        return TOKENIZER.decode(self.generator.requests[-1].token_ids)

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Of a stream that names its events; asserts that each name is the event's type."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line async for line in response.aiter_lines() if line]
        names = [line.removeprefix("event: ") for line in lines[::2]]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
        assert names == [event["type"] for event in events]
        return events

    async def chat(self, text: Any = "hi", **more: Any) -> httpx.Response:
        return await self.http.post(CHAT, json=self.body(text, **more))

    async def stream(self, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
        """Events of a stream; asserts that [DONE] ends it."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@asynccontextmanager
async def serve(asgi: Any, http: Any = "auto") -> AsyncIterator[str]:
    """Runs an ASGI app on a free loopback port; yields its URL."""
    config = uvicorn.Config(
        asgi,
        host="127.0.0.1",
        port=0,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=2,
        http=http,
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def start(model_path: Path) -> Any:
    """`async with start(config field=...) as harness`."""

    @asynccontextmanager
    async def starter(
        tracing: Any = None,
        admin: Any = None,
        injector: Any = None,
        http: Any = "auto",
        **config: Any,
    ) -> AsyncIterator[Harness]:
        said = ["Hello, world!"]
        generator = FakeGenerator(lambda _: list(said[0].encode()), EOS)
        processor = FakeInputProcessor(
            {
                "image": (IMAGE, "<image>"),
                "video": (VIDEO, "<video>"),
                "audio": (AUDIO, "<audio>"),
            }
        )
        app = build_app(
            FrontendConfig(**{"model": ModelConfig(path=str(model_path)), **config}),
            processor=processor,
            info=processor,
            generator=generator,
            tracing=tracing,
            admin=admin,
            injector=injector,
        )
        async with (
            serve(app.asgi, http) as url,
            httpx.AsyncClient(base_url=url, timeout=120) as client,
        ):
            yield Harness(app, generator, processor, url, client, said)
        app.close()
        app.gate.check_integrity()
        assert app.gate.num_requests == 0

    return starter


@pytest.fixture
async def harness(start: Any) -> AsyncIterator[Harness]:
    async with start() as found:
        yield found
