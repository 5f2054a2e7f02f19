"""Integrity report of the engine: what is in use, and whether all bookkeeping agrees.

Called in the core thread, between steps (`server` asks for it on behalf of /debug/integrity). Has
no content in it: counts, bytes, and one digest of the names of the values that mirrors may believe
in. Changes nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable

import msgspec
from blake3 import blake3

from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.plan.media import MMHash


class IntegrityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /debug/integrity.

    Attributes:
        idle: no request is here in any state, and nothing is left to do.
        broken: the assertion that failed, "" when all books agree.
        mm_used_bytes: of `mm_capacity_bytes` (C); mm_staged_bytes: of `mm_staging_bytes` (S).
        mm_digest: see `digest_of`.
    """

    engine: str
    idle: bool
    broken: str
    num_running: int
    num_waiting: int
    num_sessions: int
    kv_blocks_in_use: int
    encoder_references: int
    encoder_used_embeds: int
    mm_pinned_bytes: int
    mm_used_bytes: int
    mm_capacity_bytes: int
    mm_staged_bytes: int
    mm_staging_bytes: int
    mm_digest: str


def digest_of(hashes: Iterable[MMHash]) -> str:
    """Hex BLAKE3 of the hashes in ascending order: equal sets have equal digests."""
    return blake3(b"".join(sorted(hashes))).hexdigest()


def report(core: EngineCore, engine_id: str) -> IntegrityReport:
    """Runs every check_integrity() there is; a failed one is reported, not raised."""
    broken = ""
    try:
        core.check_integrity()
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        broken = f"{where.name}: {str(error) or where.line}"
    scheduler, receiver = core.scheduler, core.receiver
    store = receiver.store
    staged = sum(session.staged_bytes for session in receiver.sessions.values())
    own_pool = store.bypass_bytes - store.borrowed_bytes
    return IntegrityReport(
        engine=engine_id,
        idle=not (core.num_unfinished or scheduler.num_requests or core.has_work),
        broken=broken,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(receiver.admission.queue),
        num_sessions=len(receiver.sessions),
        kv_blocks_in_use=scheduler.pool.num_used_blocks,
        encoder_references=scheduler.encoder.num_references,
        encoder_used_embeds=scheduler.encoder.num_used_embeds,
        mm_pinned_bytes=store.pinned_bytes + store.bypass_bytes + store.reserved_bytes,
        mm_used_bytes=store.used_bytes,
        mm_capacity_bytes=store.capacity_bytes,
        mm_staged_bytes=staged + own_pool,
        mm_staging_bytes=receiver.limits.staging_bytes,
        mm_digest=digest_of(store.announced()),
    )
