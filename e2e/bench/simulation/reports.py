"""What a load report costs on loopback: an engine's core, its link thread and ZMQ on one side, a
frontend's client and event loop in a process of its own on the other.

    python -m e2e.bench.simulation.reports ENDPOINT COUNT     # the frontend; `measure` starts it
"""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import time
from collections.abc import Mapping

from e2e.bench.simulation.costs import CostRunner, Costs, Deployment
from e2e.bench.simulation.world import World, loaded
from foveal_runtime.engine.process.assemble import assemble_core
from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.engine.process.link_thread import LinkThread
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.mirror.messages import SessionId, Up
from foveal_runtime.mirror.store import Value
from foveal_runtime.plan.config import EngineAddress, FrontendConfig, ModelConfig
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.transport import ZmqRouter

BURST, COUNT, SLOW_COUNT = 200, 20_000, 2_000
PAUSE_SECONDS = 0.001
WAIT_SECONDS = 60.0


class _Inbox:
    """Hands what frontends say to whoever owns the core; the one frontend leaves at the end."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[tuple[str, Up]] = queue.SimpleQueue()

    def on_message(self, fid: str, message: Up, values: Mapping[MMHash, Value] | None) -> None:
        self.messages.put((fid, message))

    def on_session_lost(self, fid: str, sid: SessionId, reason: str) -> None: ...

    def on_silent(self, fid: str, sid: SessionId) -> None: ...

    def on_failure(self, error: Exception) -> None:
        raise error


def measure(deployment: Deployment, costs: Costs) -> tuple[float, float]:
    """CPU seconds of a report: of the engine that tells 200 sessions one after the other, and of a
    frontend that hears one at a time."""
    engine, _ = _tell(deployment, costs, COUNT, BURST)
    _, frontend = _tell(deployment, costs, SLOW_COUNT, 1)
    return engine, frontend


def _tell(deployment: Deployment, costs: Costs, count: int, burst: int) -> tuple[float, float]:
    inbox = _Inbox()
    links = LinkThread(
        lambda: ZmqRouter("tcp://127.0.0.1:*"), inbox, pulse=lambda: (0, False),
        clock=time.monotonic,
    )  # fmt: skip
    runner = CostRunner(deployment.traits, costs, lambda name, index: 0)
    core = assemble_core(
        deployment.engine, loaded(deployment, runner), send=links.send, clock=time.monotonic
    )
    endpoint = links.start()
    command = [sys.executable, "-m", "e2e.bench.simulation.reports", endpoint, str(count)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        fid = _session(core, inbox)
        time.sleep(0.2)
        began = time.process_time()
        for number in range(count):
            core._send_down(fid, core._load(), [])
            while number % burst == burst - 1 and links._outbox:
                time.sleep(PAUSE_SECONDS)
        spent = time.process_time() - began
        return spent / count, float(child.communicate(timeout=WAIT_SECONDS)[0]) / count
    finally:
        child.kill()
        child.wait()
        links.stop()


def _session(core: EngineCore, inbox: _Inbox) -> str:
    fid, message = inbox.messages.get(timeout=WAIT_SECONDS)
    core.on_message(fid, message)
    return fid


async def _hear(endpoint: str, count: int) -> float:
    config = FrontendConfig(
        model=ModelConfig(path="/nowhere"), engines=(EngineAddress(endpoint=endpoint),)
    )
    client = EngineClient(config, World.namespace)
    await client.start()
    [link] = client.links()
    while not link.is_ready:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    began = time.process_time()
    while link.load is None or link.load.stamp < count:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    spent = time.process_time() - began
    await client.close()
    return spent


if __name__ == "__main__":
    print(asyncio.run(_hear(sys.argv[1], int(sys.argv[2]))))
