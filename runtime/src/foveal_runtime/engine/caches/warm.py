"""The warm set: the hottest encoder outputs in a directory, over a planned restart.

Used by `core`: `save` when the engine has drained, `load` before its first step. Writes parts (the
runner's files) and an index naming them, each complete before it gets its name; the index comes
last, so a crash leaves the old set or the new one; none, where both do not fit and the old one has
to go first. Reads nothing whose namespace (weights and processor), geometry or digest differs, and
deletes only files it wrote. Never fails the engine: a directory that is lost costs encoding again,
with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from foveal_runtime.engine.caches.encoder_cache import EncoderCacheManager, Kept
from foveal_runtime.engine.types.step import ModelRunner, ModelTraits
from foveal_runtime.plan.media import MMHash

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
FORMAT = 1
INDEX = "foveal-warm.json"
_OURS = re.compile(r"foveal-warm-[0-9a-f]{16}-\d+\.(safetensors|tmp)|foveal-warm\.json\.tmp")
PART_BYTES = 64 << 20
"""One file's worth: what saving takes in memory on top of the caches."""
_MAX_INDEX_BYTES = 64 << 20
SAVE_SECONDS = 8.0
"""Between the last answer and the end of the process; pods have 15 s beyond the drain."""


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output of a part; `mm_hash` in hex, `cost_seconds` per embedding."""

    mm_hash: str
    num_embeds: int
    cost_seconds: float


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file, hottest outputs first; `digest` is its BLAKE3 in hex."""

    name: str
    digest: str
    outputs: list[Output]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the directory holds and whose it is."""

    format: int
    namespace: str
    embed_width: int
    embed_levels: int
    embed_bytes: int
    embed_kind: str
    parts: list[Part]


class Loaded(NamedTuple):
    """Keys taken over, hottest first."""

    device: list[MMHash]
    host: list[MMHash]


class WarmSet:
    """Encoder outputs in a directory, which the next process takes over.

    Args:
        max_bytes: of all outputs in the directory.
        clock: monotonic seconds.
        part_bytes: of the outputs in one file.
    """

    def __init__(
        self,
        directory: str,
        max_bytes: int,
        *,
        namespace: bytes,
        traits: ModelTraits,
        clock: Callable[[], float] = time.monotonic,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._part_bytes = part_bytes
        self._last: set[str] = set()  # parts of the set before the one that is being saved
        self._clock = clock
        self._embed_bytes = traits.embed_bytes
        self._empty = Index(
            FORMAT, namespace.hex(), traits.embed_width, traits.embed_levels, traits.embed_bytes,
            traits.embed_kind, [],
        )  # fmt: skip

    # ---- save -----------------------------------------------------------------------------------

    def save(
        self, cache: EncoderCacheManager, runner: ModelRunner, max_seconds: float = SAVE_SECONDS
    ) -> int:
        """Replaces what the directory holds by the hottest outputs; returns how many."""
        deadline = self._clock() + max_seconds
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            index, _ = self._read_index()
            self._last = {part.name for part in index.parts} if index else set()
            self._remove_others(self._last)
            parts = self._save_parts(cache.by_heat(), runner, deadline)
            data = msgspec.json.encode(msgspec.structs.replace(self._empty, parts=parts))
            self._with_room(lambda: self._write_index(data))
            self._last = {part.name for part in parts}
            self._remove_others(self._last)
        except OSError as error:
            _LOG.warning("the warm set was not saved in %s: %s", self._directory, error)
            with contextlib.suppress(OSError):
                self._remove_others(self._last)
            return 0
        return sum(len(part.outputs) for part in parts)

    def _save_parts(
        self, outputs: Iterable[Kept], runner: ModelRunner, deadline: float
    ) -> list[Part]:
        """As many as time and room allow. Raises OSError when there is no room for the first."""
        parts: list[Part] = []
        stem = f"foveal-warm-{secrets.token_hex(8)}"
        for number, wanted in enumerate(self._chunks(outputs)):
            if self._clock() > deadline:
                _LOG.warning("the warm set is cut short: its time to save is over")
                break
            save = functools.partial(self._save_part, f"{stem}-{number}", wanted, runner)
            try:
                part = self._with_room(save)
            except OSError as error:
                if not parts:
                    raise
                _LOG.warning("the warm set is cut short: %s", error)
                break
            if part is not None:
                parts.append(part)
        return parts

    def _with_room(self, write: Callable[[], _T]) -> _T:
        """What `write` returns. Where it fails beside the last set, that one goes: it is only a
        cache, and a volume of its size would never be written to again."""
        try:
            return write()
        except OSError:
            if not self._last:
                raise
        for name in (INDEX, *self._last):
            (self._directory / name).unlink(missing_ok=True)
        self._last = set()
        return write()

    def _chunks(self, outputs: Iterable[Kept]) -> Iterator[list[Kept]]:
        """Outputs that fit, hottest first, in parts."""
        left_bytes = self._max_bytes
        chunk: list[Kept] = []
        chunk_bytes = 0
        for kept in outputs:
            size = kept.num_embeds * self._embed_bytes
            if size > left_bytes:
                break
            left_bytes -= size
            if chunk and chunk_bytes + size > self._part_bytes:
                yield chunk
                chunk, chunk_bytes = [], 0
            chunk.append(kept)
            chunk_bytes += size
        if chunk:
            yield chunk

    def _save_part(self, stem: str, wanted: list[Kept], runner: ModelRunner) -> Part | None:
        path, unnamed = self._directory / f"{stem}.safetensors", self._directory / f"{stem}.tmp"
        try:
            saved = set(runner.save_encoder(str(unnamed), [kept.mm_hash for kept in wanted]))
            if not saved:
                return None
            unnamed.chmod(0o600)
            _sync(unnamed)
            digest = file_digest(unnamed)
            unnamed.replace(path)
        finally:
            unnamed.unlink(missing_ok=True)  # room for the index
        outputs = [
            Output(kept.mm_hash.hex(), kept.num_embeds, kept.cost_seconds)
            for kept in wanted
            if kept.mm_hash in saved
        ]
        return Part(path.name, digest, outputs)

    def _write_index(self, data: bytes) -> None:
        unnamed = self._directory / f"{INDEX}.tmp"
        unnamed.write_bytes(data)
        unnamed.chmod(0o600)
        _sync(unnamed)
        unnamed.replace(self._directory / INDEX)

    def _remove_others(self, names: set[str]) -> None:
        """Our files that no index names: older sets, and what a crash left half written."""
        for path in self._directory.iterdir():
            if path.name not in names and _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)

    # ---- load -----------------------------------------------------------------------------------

    def load(self, cache: EncoderCacheManager, runner: ModelRunner) -> Loaded:
        """Puts what is there into an empty cache and its runner: the hottest outputs on the
        device, the next ones into the host tier. What cannot be used is removed."""
        index, reason = self._read_index()
        if index is None:
            if reason:
                self._discard(reason)
            return Loaded([], [])
        tiers = self._divide(cache, index)
        there: dict[MMHash, Kept] = {}
        bad: list[str] = []
        for part in index.parts:
            kept = {k.mm_hash: k for k in map(_kept, part.outputs) if k.mm_hash in tiers}
            if not kept:
                continue
            sizes = [
                {k.mm_hash: k.num_embeds for k in kept.values() if tiers[k.mm_hash] == tier}
                for tier in ("device", "host")
            ]
            try:
                path = self._directory / part.name
                if file_digest(path) != part.digest:
                    raise ValueError("its digest differs")
                taken = runner.load_encoder(str(path), *sizes)
            except (OSError, ValueError) as error:
                bad.append(f"{part.name}: {error}")
                continue
            there.update((key, kept[key]) for key in taken)
        loaded = Loaded([], [])
        for key, tier in reversed(tiers.items()):  # the hottest last: the most recently used
            if key in there:
                cache.adopt(there[key], "device" if tier == "device" else "host")
                (loaded.device if tier == "device" else loaded.host).insert(0, key)
        if bad:
            self._discard("; ".join(bad))
        return loaded

    def _divide(self, cache: EncoderCacheManager, index: Index) -> dict[MMHash, str]:
        """The tier of each output that fits somewhere, hottest first."""
        assert not len(cache)
        assert not len(cache.host)
        device_embeds = cache.num_free_embeds
        host_bytes = cache.host.capacity_bytes
        tiers: dict[MMHash, str] = {}
        for output in (output for part in index.parts for output in part.outputs):
            key, size = bytes.fromhex(output.mm_hash), output.num_embeds * self._embed_bytes
            if key in tiers:
                continue
            if output.num_embeds <= device_embeds:
                device_embeds -= output.num_embeds
                tiers[key] = "device"
            elif size <= host_bytes:
                host_bytes -= size
                tiers[key] = "host"
        return tiers

    def _read_index(self) -> tuple[Index | None, str]:
        """The index, or why it is of no use ("" = there is none)."""
        path = self._directory / INDEX
        try:
            if path.stat().st_size > _MAX_INDEX_BYTES:
                return None, "its index is larger than any we write"
            index = msgspec.json.decode(path.read_bytes(), type=Index)
            for part in index.parts:
                _check(part)
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError) as error:
            return None, f"its index cannot be read: {error}"
        for name in ("format", "namespace", "embed_width", "embed_levels", "embed_bytes",
                     "embed_kind"):  # fmt: skip
            if getattr(index, name) != getattr(self._empty, name):
                return None, f"it was made with another {name}"
        return index, ""

    def _discard(self, reason: str) -> None:
        _LOG.warning("the warm set in %s is not used: %s", self._directory, reason)
        try:
            (self._directory / INDEX).unlink(missing_ok=True)
            self._remove_others(set())
        except OSError as error:
            _LOG.warning("it could not be removed: %s", error)


def _kept(output: Output) -> Kept:
    return Kept(bytes.fromhex(output.mm_hash), output.num_embeds, output.cost_seconds)


def _check(part: Part) -> None:
    """Raises ValueError for what we never write."""
    if not _OURS.fullmatch(part.name):
        raise ValueError(f"{part.name!r} is no name of ours")
    for output in part.outputs:
        if len(bytes.fromhex(output.mm_hash)) != 32 or output.num_embeds < 1:
            raise ValueError(f"{part.name} has an impossible output")


def file_digest(path: Path) -> str:
    """BLAKE3 of a file, in hex. Raises OSError."""
    hasher = blake3()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
