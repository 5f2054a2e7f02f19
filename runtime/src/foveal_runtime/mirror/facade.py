"""`get_and_update` and `reset` on both halves, for callers that carry the items themselves.

The classic shape of a mirrored multimodal cache: the sending side turns items the other side has
into None, the receiving side turns None back into items. Used by in-process setups and by whoever
ports code of that shape; the engine client and the engine server use `sender` and `receiver`
directly. Both sides must see the same calls in the same order, and the sender must be given the
receiver's notes (`receiver.down`); a hint that turns out stale is a MissingValues naming what to
send again, never a wrong item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foveal_runtime.mirror.receiver import Receiver
from foveal_runtime.mirror.sender import Sender, SendItem, SendValue
from foveal_runtime.mirror.store import Buffer, Value
from foveal_runtime.plan.media import MMHash


class MissingValues(LookupError):
    """Items came as None and are not here. `hashes`: all of them; send their values again."""

    def __init__(self, hashes: list[MMHash]) -> None:
        super().__init__(f"{len(hashes)} items are not cached: send their values again")
        self.hashes = hashes


def _no_digest(_: Buffer) -> bytes:
    return b""


class SenderCache:
    """The frontend's side, over an open Sender."""

    def __init__(self, sender: Sender, digest: Callable[[Buffer], bytes] = _no_digest) -> None:
        self.sender = sender
        self._digest = digest

    def get_and_update(
        self, items: Sequence[Buffer], mm_hashes: Sequence[MMHash]
    ) -> list[Buffer | None]:
        """None for what the receiver has (or gets earlier in this very call), else the item.
        What is returned must be sent: the mirror believes in it from now on."""
        assert len(items) == len(mm_hashes)
        distinct = dict(zip(mm_hashes, items, strict=True))
        values = {h: SendValue(item, self._digest(item)) for h, item in distinct.items()}
        believed = {h for h in distinct if self.sender.believes(h)}
        self.sender.put_always([SendItem(h, len(item)) for h, item in distinct.items()], values)
        out: list[Buffer | None] = []
        for mm_hash, item in zip(mm_hashes, items, strict=True):
            out.append(None if mm_hash in believed else item)
            believed.add(mm_hash)
        return out

    def reset(self) -> None:
        self.sender.reset()


class ReceiverCache:
    """The engine's side, over a Receiver with an open session of frontend `fid`."""

    def __init__(self, receiver: Receiver, fid: str) -> None:
        self.receiver = receiver
        self.fid = fid

    def get_and_update(
        self, items: Sequence[Buffer | None], mm_hashes: Sequence[MMHash]
    ) -> list[Buffer]:
        """The items, with None restored. Raises MissingValues after storing all that came."""
        assert len(items) == len(mm_hashes)
        given = {h: item for h, item in zip(mm_hashes, items, strict=True) if item is not None}
        found: dict[MMHash, Buffer] = dict(given)
        store = self.receiver.store
        for mm_hash in dict.fromkeys(mm_hashes):
            entry = store.lookup(mm_hash)
            if entry is not None and entry.value is not None:
                found[mm_hash] = entry.value.data
                store.pin(mm_hash)  # pinned and unpinned again: now the most recently used
                store.unpin(mm_hash)
        values = {h: Value(item) for h, item in given.items()}
        self.receiver.insert(self.fid, values)
        missing = [h for h in dict.fromkeys(mm_hashes) if h not in found]
        if missing:
            raise MissingValues(missing)
        return [found[h] for h in mm_hashes]

    def reset(self) -> None:
        self.receiver.reset()
