"""The messages of the cache protocol, as plain structs: one union up, one union down.

A *link* is one (frontend, engine) pair, a *session* one life of a link. Built and read by
`sender` (frontend half) and `receiver` (engine half); encoded by wire/, which adds frames for
value bytes. Every numbered frontend message has n = 1, 2, 3, ...; every engine message k = 1, 2,
... A gap on either side ends the session: the session is the epoch.
"""

from __future__ import annotations

import msgspec

from foveal_runtime.plan.media import ItemMeta, MMHash

PROTOCOL_VERSION = 2

MAX_VALUE_BYTES = 1024**3
"""The largest value that a message carries; any value may have to travel in one."""

NIL = msgspec.Raw(b"\xc0")
"""An opaque part that says nothing."""

SessionId = tuple[int, int]
"""(fboot: u64 of its own for each link of a frontend, cnt: number of the HELLO)."""

RequestId = tuple[str, int]
"""(request id, attempt number)."""

Alias = bytes
"""32-byte hash of (tenant, user's uuid): bound to one MMHash at first sight."""


class InlineValue(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The value is multipart frame `frame` of this message; `digest` is its 8-byte BLAKE3."""

    frame: int
    digest: bytes


class SharedValue(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The value is an immutable file in the node's shared tmpfs; never taken from a client."""

    name: str
    length: int
    digest: bytes


ValueRef = InlineValue | SharedValue


class ItemRef(msgspec.Struct, frozen=True, array_like=True):
    """One distinct item of a request: its hash, serialised size and, unless believed, its value.

    `source` is the frontend/injector id asked first by NEED when the value is missing.
    """

    mm_hash: MMHash
    size_bytes: int
    value: ValueRef | None = None
    source: str | None = None


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Opens a session. `namespace` identifies model and processor; another one is refused."""

    version: int
    frontend_id: str
    sid: SessionId
    namespace: bytes
    node: str


class Req(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request. `items` lists distinct hashes in first-use order; `body` is opaque here."""

    sid: SessionId
    n: int
    rid: RequestId
    items: tuple[ItemRef, ...]
    body: msgspec.Raw
    binds: tuple[tuple[Alias, MMHash], ...] = ()


class Put(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Values only: external injection, prefetch."""

    sid: SessionId
    n: int
    items: tuple[ItemRef, ...]
    binds: tuple[tuple[Alias, MMHash], ...] = ()


class Fill(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answers NEED with the value."""

    sid: SessionId
    n: int
    mm_hash: MMHash
    size_bytes: int
    value: ValueRef


class NoFill(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answers NEED when no unfinished request of this link uses the hash any more."""

    sid: SessionId
    n: int
    mm_hash: MMHash


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=6):
    sid: SessionId
    n: int
    rid: RequestId


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Not numbered; either direction."""

    sid: SessionId


class Control(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Administration of one engine.

    `action` is reset_mm, reset_encoder, reset_prefix, resize_ipc (`value` = bytes), load_lora or
    unload_lora (`value` = a number by which its outcome is known, `lora` = name and directory).
    """

    sid: SessionId
    n: int
    action: str
    value: int = 0
    lora: tuple[str, ...] = ()


class Refusals(msgspec.Struct, frozen=True, array_like=True):
    """Requests that killed engines, as (key, wall-clock seconds when convicted, shape), ascending;
    those of `cleared_at` and before are forgotten. See `refusals`."""

    cleared_at: float = 0.0
    entries: tuple[tuple[bytes, float, str], ...] = ()


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Tells an engine, and through it all other frontends, what this frontend knows."""

    sid: SessionId
    n: int
    refusals: Refusals


Up = Hello | Req | Put | Fill | NoFill | Abort | Heartbeat | Control | Refuse


class Death(msgspec.Struct, frozen=True, array_like=True):
    """The end of a life of this engine in the middle of its work.

    Attributes:
        boot: which life. `at`: wall-clock seconds.
        suspects: keys of the requests that it may have died of; no other is to blame.
        is_own: it failed or crashed by itself; False: it may have been killed from outside.
    """

    boot: int
    at: float
    suspects: tuple[bytes, ...]
    is_own: bool


class Announced(msgspec.Struct, frozen=True, array_like=True):
    """One resident value."""

    mm_hash: MMHash
    size_bytes: int
    meta: ItemMeta | None


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Opens the session on the engine's side with the full directory.

    Attributes:
        boot: u64 that changes with every engine start.
        capacity_bytes: C. window_bytes: credit for optimistic values; 0 = pull only.
        max_inline_bytes: the largest sum of item bytes of one request, through or past the cache.
        info: engine facts the request layer needs (opaque to the mirror; wire.messages.EngineInfo).
        max_cacheable_bytes: larger items are never kept, so a sender must not believe in them.
        refusals: None from an engine that knows no Refuse. `death`: of this engine's last life.
    """

    sid: SessionId
    k: int
    boot: int
    capacity_bytes: int
    window_bytes: int
    max_inline_bytes: int
    node: str
    directory: tuple[Announced, ...]
    bindings: tuple[tuple[Alias, MMHash], ...]
    info: msgspec.Raw
    max_cacheable_bytes: int = 0
    refusals: Refusals | None = None
    death: Death | None = None


class MirrorNote(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The mirror's part of a downward message: what changed since the last one."""

    ack: int
    plus: tuple[Announced, ...] = ()
    minus: tuple[MMHash, ...] = ()
    need: tuple[MMHash, ...] = ()
    rejected: tuple[tuple[RequestId, str], ...] = ()
    bound: tuple[tuple[Alias, MMHash], ...] = ()
    unbound: tuple[Alias, ...] = ()
    capacity_bytes: int | None = None
    refusals: Refusals | None = None


class Down(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Everything an open session receives: a mirror note, outputs (opaque here), or both.

    `outputs` is NIL when there are none (the codec cannot carry `Raw | None`).
    """

    sid: SessionId
    k: int
    note: MirrorNote | None = None
    outputs: msgspec.Raw = NIL


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """The session is over: unknown_session, gap, ns_mismatch, version_mismatch, draining, ...
    `death`: when this life ends, or the last one ended, in the middle of its work."""

    sid: SessionId
    reason: str
    death: Death | None = None


class EngineHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """Not numbered. `watermark` counts finished steps; `busy` tells that work is waiting."""

    sid: SessionId
    watermark: int
    busy: bool


DownMessage = Welcome | Down | Bye | EngineHeartbeat
