"""A real browser without a window, for tests of pages: Chromium, spoken to over its own protocol.

`find()` names the program or None; it comes from the machine's packages (`chromium`), never from
this project. FOVEAL_CHROMIUM names another.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
_WAIT_SECONDS = 90.0


def find() -> str | None:
    named = os.environ.get("FOVEAL_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Tab:
    """One page. `complaints` are its errors, `requests` the addresses that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._heard(said["method"], said["params"])

    def _heard(self, method: str, said: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(said["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(said["args"]))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._answers[number], _WAIT_SECONDS)
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    async def open(self, url: str, width: int, dark: bool = False) -> None:
        """Loads a page into a window that is `width` pixels wide."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.send(f"{domain}.enable")
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=900,
                        deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), _WAIT_SECONDS)

    async def value(self, script: str) -> Any:
        """What an expression is worth in the page."""
        said = await self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def picture(self) -> bytes:
        """The whole page, however long, as PNG."""
        height = await self.value("document.documentElement.scrollHeight")
        width = await self.value("window.innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        said = await self.send("Page.captureScreenshot", format="png", clip=clip,
                               captureBeyondViewport=True)  # fmt: skip
        return base64.b64decode(said["data"])


@contextlib.asynccontextmanager
async def tab(program: str) -> AsyncIterator[Tab]:
    """A fresh browser with one empty page; both end with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            port = await asyncio.wait_for(_port(process), _WAIT_SECONDS)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(
                    pages[0]["webSocketDebuggerUrl"], max_msg_size=256 << 20
                ) as socket:
                    found = Tab(socket)
                    listener = asyncio.create_task(found.listen())
                    yield found
                    await socket.close()
                    await listener
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await asyncio.wait_for(process.communicate(), _WAIT_SECONDS)


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async for line in process.stderr:
        text = line.decode(errors="replace")
        if "DevTools listening on ws://" in text:
            return int(text.split("://", 1)[1].split("/")[0].rsplit(":", 1)[1])
    raise AssertionError("the browser ended before it listened")
