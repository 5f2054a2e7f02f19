"""Values through the node's shared memory: which engines get a name instead of bytes.

Owned by engine_client, asked by its links before they send. Wraps `wire.shm_writer`, which writes
each value once and frees by its own budget; what finds no room goes inline. Never answers a NEED:
that may mean that a shared file could not be opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from foveal_runtime.mirror.sender import Sender
from foveal_runtime.mirror.store import Buffer
from foveal_runtime.plan.config import FrontendConfig
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.shm_writer import SharedWriter

MIN_BYTES = 16 * 1024
"""Smaller values are not worth a file."""


class Holder(Protocol):
    """A link whose engine may hold files."""

    endpoint: str
    sender: Sender


class SharedValues:
    """`links` gives the links there are now."""

    def __init__(self, writer: SharedWriter, links: Callable[[], Iterable[Holder]]) -> None:
        self.writer = writer
        self._links = links

    @classmethod
    def from_config(
        cls, config: FrontendConfig, boot: int, links: Callable[[], Iterable[Holder]]
    ) -> SharedValues | None:
        """None when values go inline. Raises StartupError when the folder cannot be made."""
        if config.ipc_type != "shm" or not config.shm_directory or config.shm_bytes <= 0:
            return None
        return cls(SharedWriter(Path(config.shm_directory), boot, config.shm_bytes), links)

    def name(self, link: Holder, mm_hash: MMHash, data: Buffer, value_digest: bytes) -> str:
        """The name to send to this engine, "" when the value goes inline."""
        if len(data) < MIN_BYTES or not link.sender.shares_node():
            return ""
        found = self.writer.put(mm_hash, data, value_digest)
        if found is None:
            self._reconcile()
            found = self.writer.put(mm_hash, data, value_digest)
        return found or ""

    def sent(self, link: Holder, mm_hash: MMHash) -> None:
        self.writer.sent(mm_hash, link.endpoint)

    def forget(self, endpoint: str) -> None:
        """The engine is gone, and its mappings with it."""
        self.writer.forget_engine(endpoint)

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
