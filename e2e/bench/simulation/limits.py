"""What links cost, by the product's own objects: memory of a mirror, messages, decisions.

Measured here and now: CPU seconds of this machine, bytes that Python allocates. `break_points` says
at which size each becomes too much.
"""

from __future__ import annotations

import gc
import time
import tracemalloc

import msgspec

from e2e.bench.simulation import reports
from e2e.bench.simulation.costs import Costs, Deployment
from e2e.bench.simulation.virtual import run
from e2e.bench.simulation.world import Ask, World
from foveal_runtime.engine.process.load_reports import PER_SECOND
from foveal_runtime.frontend.engines.run import EngineRun
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.mirror.messages import PROTOCOL_VERSION, Announced, Hello, Welcome
from foveal_runtime.mirror.receiver import Receiver
from foveal_runtime.mirror.records import ReceiverLimits
from foveal_runtime.mirror.sender import Sender
from foveal_runtime.plan.media import ItemMeta
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import EngineInfo

INFO = codec.encode_info(EngineInfo("e0", "m", "", 4096, 128))
CHOICES = (2, 20, 200)
REPEATS = 50


class Limits(msgspec.Struct, kw_only=True):
    """Bytes of one mirror: empty, and of each value in it. CPU seconds of a load report: at the
    engine (made and encoded), at the frontend (decoded and taken in); of choosing among so many
    engines. `num_windows`: sessions that an engine gives a window, by its default limits."""

    mirror_bytes: float
    entry_bytes: float
    report_engine_seconds: float
    report_frontend_seconds: float
    choice_seconds: dict[int, float]
    max_sessions: int
    num_windows: int


class Break(msgspec.Struct, kw_only=True):
    """`size`: frontends at one engine, or engines at one frontend, where `what` happens."""

    what: str
    counted: str
    size: float
    why: str


def mirror_bytes(num_entries: int) -> int:
    """Of a `Sender` that knows so many values."""
    gc.collect()
    tracemalloc.start()
    try:
        sender = Sender("f0/1-abcdef", frontend_boot=1)
        sid = sender.hello().message.sid
        entries = [Announced(i.to_bytes(32, "big"), 342_400, ItemMeta(0, 576, 576))
                   for i in range(num_entries)]  # fmt: skip
        raw = codec.encode_down(
            Welcome(sid, 1, 1, 1 << 32, 0, 1 << 32, "", tuple(entries), (), INFO)
        )
        del entries
        sender.on_down(codec.decode_down([memoryview(frame) for frame in raw]))
        assert len(sender.confirmed) == num_entries
        del raw
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def sessions(item_bytes: int) -> tuple[int, int]:
    """How many frontends an engine with default limits takes, and gives a window for an item."""
    receiver = Receiver(ReceiverLimits(capacity_bytes=4 << 30), info=INFO)
    taken = windows = 0
    while True:
        hello = Hello(PROTOCOL_VERSION, f"f{taken}", (1, 1), b"", "")
        [answer] = receiver.on_message(hello.frontend_id, hello)
        if not isinstance(answer, Welcome):
            return taken, windows
        taken += 1
        windows += answer.window_bytes >= item_bytes


async def _choice(deployment: Deployment, costs: Costs, num_engines: int) -> float:
    async with World(deployment, costs, 1, num_engines) as world:
        frontend = world.frontends[0]
        item = await frontend.prepare(7)
        ask = Ask([1, deployment.placeholder, *range(100, 140)], (7,), (5,))
        request = PreparedRequest("r", ask.tokens, [item], [(1, 0)], SamplingParams(max_tokens=1))
        began = time.process_time()
        for _ in range(REPEATS):
            assert frontend.client._choose(EngineRun(request)) is not None
        return (time.process_time() - began) / REPEATS


def measure(deployment: Deployment, costs: Costs) -> Limits:
    empty, full = mirror_bytes(0), mirror_bytes(10_000)
    made, taken = reports.measure(deployment, costs)
    max_sessions, num_windows = sessions(deployment.item_bytes)
    return Limits(
        mirror_bytes=empty, entry_bytes=(full - empty) / 10_000,
        report_engine_seconds=made, report_frontend_seconds=taken,
        choice_seconds={n: run(_choice(deployment, costs, n)) for n in CHOICES},
        max_sessions=max_sessions, num_windows=num_windows,
    )  # fmt: skip


def break_points(
    found: Limits, *, reports_per_second: float, entries: float, memory_bytes: float,
    requests_per_second: float,
) -> list[Break]:  # fmt: skip
    """What is too much, and from where on.

    Args:
        reports_per_second: of one engine to one frontend.
        entries: values in one engine's cache. memory_bytes: that a frontend has for mirrors.
        requests_per_second: of one frontend.
    """
    most = max(found.choice_seconds)
    per_candidate = found.choice_seconds[most] / most
    mirror = found.mirror_bytes + entries * found.entry_bytes
    frontend = 1 / (reports_per_second * found.report_frontend_seconds)
    return sorted(
        (
            Break(what="windows are given away: a new value takes a round trip more",
                  counted="frontends", size=found.num_windows,
                  why="a session gets half of what is left of staging"),
            Break(what="engines refuse sessions", counted="frontends", size=found.max_sessions,
                  why="ReceiverLimits.max_sessions"),
            Break(what="a load report is a second old", counted="frontends", size=PER_SECOND,
                  why=f"{PER_SECOND} a second of an engine to all, "
                  f"{1e6 * found.report_engine_seconds:.0f} us each"),
            Break(what="load reports take a frontend's event loop", counted="engines",
                  size=frontend, why=f"{reports_per_second:.1f} a second from each, "
                  f"{1e6 * found.report_frontend_seconds:.0f} us each"),
            Break(what="mirrors take the memory meant for them", counted="engines",
                  size=memory_bytes / mirror, why=f"{mirror / 1e6:.1f} MB each at "
                  f"{entries:.0f} values"),
            Break(what="choosing an engine takes a frontend's event loop", counted="engines",
                  size=1 / (requests_per_second * per_candidate),
                  why=f"{1e6 * per_candidate:.1f} us an engine, {requests_per_second:.1f} "
                  "requests a second"),
        ),
        key=lambda one: one.size,
    )  # fmt: skip
