"""A deployment on one machine: the document that the launcher runs, and the addresses in it.

Written by `foveal up` (from the pods' documents) and by `foveal-runtime serve` (from its options);
read by `foveal-runtime launch`. The operator imports nothing else of the launcher.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence

import msgspec

from foveal_runtime.plan.config import EngineAddress, EngineConfig, FrontendConfig
from foveal_runtime.plan.errors import StartupError

LOOPBACK = "127.0.0.1"
PARENT_VARIABLE = "FOVEAL_PARENT_PID"
"""A runtime process that is told its parent ends with it, however the parent ends."""
COUNTS_VARIABLE = "FOVEAL_COUNTS_FILE"
"""Where a frontend keeps what it has counted, to count on from there when it is started again."""


class LocalDeploymentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Frontends and engines of this machine.

    Attributes:
        name: the title of the live view.
        folder: for documents and logs, "" = a new one; removed after a good end unless
            `keep_folder`.
        scratch: directories that are removed at every end.
        devices_per_engine: GPUs that each engine sees; 0 = what the environment says.
        view: tables of all processes and caches, or one status line.
    """

    name: str
    engines: tuple[EngineConfig, ...]
    frontends: tuple[FrontendConfig, ...]
    folder: str = ""
    keep_folder: bool = False
    scratch: tuple[str, ...] = ()
    devices_per_engine: int = 0
    start_timeout_seconds: float = 600.0
    drain_timeout_seconds: float = 135.0
    view: str = "tables"


def free_port(host: str = LOOPBACK) -> int:
    """A port that was free a moment ago, below the range from which outgoing connections take
    theirs: one of those could otherwise sit on it before the server binds."""
    for _ in range(200):
        port = random.randint(12000, 30000)
        if bind_error(host, port) is None:
            return port
    raise StartupError(f"no free port between 12000 and 30000 on {host}")


def bind_error(host: str, port: int) -> OSError | None:
    """Why no server could listen there now; None when one could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers bind: connections of one that has ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
        return None


def url_host(host: str) -> str:
    """What stands in a URL of this machine for an address that a server is bound to."""
    if host in ("0.0.0.0", "::"):
        return LOOPBACK if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host


def _events_bind(wanted: str, index: int) -> str:
    """Two ports an engine, its replay socket's too, from the document's on; "" stays off."""
    if not wanted:
        return ""
    first = int(wanted.rpartition(":")[2])
    return f"tcp://{LOOPBACK}:{first + 2 * index}"


def connect(
    engines: Sequence[EngineConfig],
    frontends: Sequence[FrontendConfig],
    host: str,
    port: int,
    pick_port: Callable[[], int],
) -> tuple[tuple[EngineConfig, ...], tuple[FrontendConfig, ...]]:
    """The documents with addresses of this machine: engines on loopback, the first frontend on
    `port`, the next ones on the ports after it (0: any free ports). Every frontend knows every
    engine, and its /metrics shows every other process too. Streams of cache events keep their port,
    each engine's two above the last one's."""
    placed = tuple(
        msgspec.structs.replace(
            engine,
            bind=f"tcp://{LOOPBACK}:{pick_port()}",
            http_host=LOOPBACK,
            http_port=pick_port(),
            node="local",
            events_bind=_events_bind(engine.events_bind, index),
        )
        for index, engine in enumerate(engines)
    )
    addresses = tuple(
        EngineAddress(endpoint=engine.bind, http=f"http://{engine.http_host}:{engine.http_port}")
        for engine in placed
    )
    ports = [port + i if port else pick_port() for i in range(len(frontends))]
    metrics = [f"{address.http}/metrics" for address in addresses]
    return placed, tuple(
        msgspec.structs.replace(
            frontend,
            host=host,
            port=own,
            engines=addresses,
            node="local",
            metrics_peers=(
                *metrics,
                *(f"http://{url_host(host)}:{p}/metrics?own=1" for p in ports if p != own),
            ),
        )
        for frontend, own in zip(frontends, ports, strict=True)
    )
