"""Values in the node's shared memory: engines of the node get a name instead of bytes.

Owned by `client`, asked by its links before they send. Wraps `wire.shm.SharedWriter`, which writes
each value once and frees by its own budget; what finds no room goes inline. Never answers a NEED:
that may mean that a shared file could not be opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from foveal_runtime.mirror.sender import Sender
from foveal_runtime.mirror.store import Buffer
from foveal_runtime.plan.config import FrontendConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.shm import SharedWriter, check_capacity

log = logging.getLogger(__name__)

MAX_WATCHED = 16
MAX_MISSES = 3
"""An engine that opened none of so many files does not see our folder."""


class Holder(Protocol):
    """A link whose engine may hold files. `boot` changes with every start of the engine."""

    endpoint: str
    sender: Sender
    boot: int


@dataclass(slots=True)
class _Sight:
    """Whether one engine, in one life, can open our files."""

    boot: int
    named: dict[MMHash, None] = field(default_factory=dict)
    num_misses: int = 0
    sees: bool = False

    @property
    def is_blind(self) -> bool:
        return not self.sees and self.num_misses >= MAX_MISSES


class SharedValues:
    """`links` gives the links there are now.

    Attributes:
        fallbacks: values that went inline although the engine is on this node, by reason: no_room,
            write_failed, engine_blind.
    """

    def __init__(
        self, writer: SharedWriter, links: Callable[[], Iterable[Holder]], min_bytes: int = 0
    ) -> None:
        self.writer = writer
        self._min_bytes = min_bytes
        self.fallbacks = {"no_room": 0, "write_failed": 0, "engine_blind": 0}
        self._links = links
        self._sights: dict[str, _Sight] = {}

    @classmethod
    def from_config(
        cls, config: FrontendConfig, boot: int, links: Callable[[], Iterable[Holder]]
    ) -> SharedValues | None:
        """None when values go inline. The processes of a pod have equal parts of `shm_bytes`.

        Raises StartupError when the folder cannot be made or cannot hold the budget.
        """
        if config.ipc_type != "shm" or config.shm_bytes <= 0:
            return None
        if not config.shm_directory:
            raise StartupError('ipc_type "shm" needs shm_directory, a tmpfs that engines see too')
        directory = Path(config.shm_directory)
        check_capacity(directory, config.shm_bytes)
        writer = SharedWriter(directory, boot, config.shm_bytes // config.processes)
        return cls(writer, links, config.shm_min_value_bytes)

    def name(self, link: Holder, mm_hash: MMHash, data: Buffer, value_digest: bytes) -> str:
        """The name to send to this engine, "" when the value goes inline."""
        if len(data) < self._min_bytes or not link.sender.shares_node():
            return ""
        if self._sight(link).is_blind:
            self.fallbacks["engine_blind"] += 1
            return ""
        failed = self.writer.num_failed
        found = self.writer.put(mm_hash, data, value_digest)
        if found is None and self.writer.num_failed == failed:
            self._reconcile()
            found = self.writer.put(mm_hash, data, value_digest)
        if found is None:
            why = "no_room" if self.writer.num_failed == failed else "write_failed"
            self.fallbacks[why] += 1
        return found or ""

    def sent(self, link: Holder, mm_hash: MMHash) -> None:
        self.writer.sent(mm_hash, link.endpoint)
        sight = self._sight(link)
        if not sight.sees and len(sight.named) < MAX_WATCHED:
            sight.named[mm_hash] = None

    def needed(self, link: Holder, mm_hash: MMHash) -> None:
        """The engine asks for a value: it may not have been able to open the file. An engine that
        opens none, say because another volume is mounted there, gets values inline from then on
        instead of a round trip for each."""
        sight = self._sight(link)
        if sight.sees or mm_hash not in sight.named:
            return
        del sight.named[mm_hash]
        sight.num_misses += 1
        if sight.is_blind:
            sight.named.clear()
            log.warning("engine %s opens no shared values: it gets them inline; are shm_directory "
                        "and the volume the same there?", link.endpoint)  # fmt: skip

    def forget(self, endpoint: str) -> None:
        """The engine is gone, and its mappings with it."""
        self.writer.forget_engine(endpoint)
        self._sights.pop(endpoint, None)

    def _sight(self, link: Holder) -> _Sight:
        known = self._sights.get(link.endpoint)
        if known is None or known.boot != link.boot:
            known = self._sights[link.endpoint] = _Sight(link.boot)
        elif any(h in link.sender.confirmed for h in known.named):
            known.sees = True
            known.named.clear()
        return known

    def close(self) -> None:
        self.writer.close()

    def _reconcile(self) -> None:
        """Asks every mirror what its engine still holds: only when room is short."""
        for link in self._links():
            sender = link.sender
            if sender.is_up:
                self.writer.reconcile(
                    link.endpoint,
                    lambda h, one=sender: one.believes(h) or one.is_needed(h),  # type: ignore[misc]
                )
