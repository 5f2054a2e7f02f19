"""Items processed elsewhere (a router, an encoder process): into the processor cache and an engine.

Off by default. A processed tensor cannot be checked against a hash of encoded bytes, so an
injector's items live under its own namespace, which is part of their key, unless the operator
trusts it to name our keys itself. Called by input_processor and by the HTTP endpoint, which checks
the injector's API key first. Never changes an item it is given, never fails a caller's request.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.items.interfaces import Knowledge
from foveal_runtime.frontend.items.processor_cache import ProcessorCache
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.mirror.sender import SendItem, SendValue
from foveal_runtime.plan.config import InjectionConfig
from foveal_runtime.plan.errors import InvalidRequest, MediaInvalid
from foveal_runtime.plan.media import MODALITIES, MMHash, Modality
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import ITEM_SIZES, U32, BadItem, pack_item, runs_of, view_item

log = logging.getLogger(__name__)

MAX_ITEMS = 256
MAX_NAME_LENGTH = 256
_KEY = re.compile(r"[0-9A-Fa-f]{64}")  # fromhex alone takes spaces, and a shorter key


class InjectedField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: a torch dtype name ("bfloat16"), its shape, little-endian data."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class InjectedItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One item of the endpoint's payload.

    Attributes:
        name: what requests will call it (`uuid`), or, from a trusted injector, our key in hex.
        value: a serialised item (`wire.item`); else `fields` and `replacement` make one.
        replacement: token ids its placeholder expands to; `embed_runs` the (start, length) runs
            that take encoder outputs, default: where the modality's own token stands.
    """

    modality: Modality
    name: str
    value: bytes = b""
    fields: dict[str, InjectedField] = {}
    replacement: tuple[U32, ...] = ()
    embed_runs: tuple[tuple[U32, U32], ...] = ()


class InjectedItems(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    items: tuple[InjectedItem, ...]


class Packed(NamedTuple):
    """A checked item of a payload, serialised."""

    modality: Modality
    name: str
    value: bytes


_MSGPACK = msgspec.msgpack.Decoder(InjectedItems)
_JSON = msgspec.json.Decoder(InjectedItems)


class Injector:
    """Takes processed items of other processes in."""

    def __init__(
        self,
        config: InjectionConfig,
        info: ProcessorInfo,
        cache: ProcessorCache,
        stats: FrontendStats,
        knowledge: Knowledge,
    ) -> None:
        self._config = config
        self._info = info
        self._cache = cache
        self._stats = stats
        self._knowledge = knowledge

    @property
    def has_cache(self) -> bool:
        return self._cache.capacity_bytes > 0 or self._knowledge.has_cache()

    def key(self, name: str, tenant: bytes, *, trusted: bool) -> MMHash:
        """The key of an injected item. From a trusted injector 64 hex digits are our own key."""
        if trusted and _KEY.fullmatch(name):
            return bytes.fromhex(name)
        return hashing.injected_hash(
            name, namespace=self._config.namespace, identity=self._info.identity, salt=tenant
        )

    def recall(self, name: str, tenant: bytes, *, is_salted: bool = False) -> MMHash:
        """The key that a request's uuid would have as the name of an injected item. All requests
        of the tenant it was injected for share it, whatever their own salts.

        Who has a salt cannot name raw keys: they would reach past it.
        """
        return self.key(name, tenant, trusted=self._config.trusted and not (tenant or is_salted))

    def inject(
        self, mm_hashes: Mapping[str, Sequence[str]], mm_kwargs: Mapping[str, Sequence[Any]]
    ) -> None:
        """Stores items by modality and name; an absent or None item is skipped. For code in this
        process, which is trusted: 64 hex digits are our own key.

        An item is serialised bytes, or a mapping of tensor name → array (numpy or torch) with
        `replacement` and, if it differs from the default, `embed_runs`. Each one counts as a query
        without a hit. Any problem is a warning; nothing happens when every cache is off.
        """
        if not self.has_cache:
            return
        for modality, names in mm_hashes.items():
            items = mm_kwargs.get(modality, ())
            for index, name in enumerate(names):
                item = items[index] if index < len(items) else None
                if item is None:
                    continue
                try:
                    key = self.key(name, b"", trusted=True)
                    self._store(key, modality, self._pack(modality, item))
                except Exception as error:  # a foreign object may raise anything; requests go on
                    self._stats.injection_failures += 1
                    log.warning("cannot inject %s %d: %s", modality, index, error)

    def read_payload(self, body: bytes | memoryview, content_type: str) -> list[Packed]:
        """Decodes and checks msgpack (`application/msgpack`) or JSON (bytes as base64); changes
        nothing, so a thread may do it for large bodies. Raises InvalidRequest or MediaInvalid that
        names the item."""
        decoder = _MSGPACK if "msgpack" in content_type else _JSON
        try:
            payload = decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"payload: {error}") from error
        if len(payload.items) > MAX_ITEMS:
            raise InvalidRequest(
                f"payload has {len(payload.items)} items, the limit is {MAX_ITEMS}"
            )
        packed = []
        for index, item in enumerate(payload.items):
            try:
                if not 0 < len(item.name) <= MAX_NAME_LENGTH:
                    raise BadItem(f"name must have 1 to {MAX_NAME_LENGTH} characters")
                value = self._pack(item.modality, item.value or _mapping(item))
            except (BadItem, ValueError, TypeError) as error:
                self._stats.injection_failures += 1
                raise MediaInvalid(f"items[{index}]: {error}", param=f"items[{index}]") from error
            packed.append(Packed(item.modality, item.name, value))
        return packed

    def store_payload(self, items: Sequence[Packed], tenant: bytes) -> dict[str, int]:
        """Keeps what `read_payload` made. Returns {"stored": items kept, "sent": items an engine
        took}. With every cache off nothing can be kept."""
        if not self.has_cache:
            return {"stored": 0, "sent": 0}
        sent = 0
        for item in items:
            key = self.key(item.name, tenant, trusted=self._config.trusted)
            sent += self._store(key, item.modality, item.value)
        return {"stored": len(items), "sent": sent}

    def _store(self, key: MMHash, modality: str, value: bytes) -> int:
        index = MODALITIES.index(modality)
        self._stats.mm_queries[index] += 1
        known = self._cache.peek(key)
        if known is not None and bytes(known) != value:
            self._stats.injection_failures += 1
            log.warning("%s %s was injected with another value before: the first one stays",
                        modality, key.hex()[:12])  # fmt: skip
            return 0
        self._cache.commit(key, value)
        self._stats.injected += 1
        item = SendItem(key, len(value))
        return self._knowledge.put([item], {key: SendValue(value, codec.digest(value))})

    def _pack(self, modality: str, item: Any) -> bytes:
        """Checked serialised bytes of our own. Raises BadItem, ValueError or TypeError."""
        index = MODALITIES.index(modality)
        if isinstance(item, (bytes, bytearray, memoryview)):
            value = bytes(item)
        else:
            value = self._serialise(index, dict(item))
        header = view_item(value).header
        if header.modality != index:
            raise BadItem(f"the item is {MODALITIES[header.modality]}, not {modality}")
        if not header.embed_runs or not header.fields:
            raise BadItem("the item has no tensors or takes no place in the prompt")
        return value

    def _serialise(self, modality: int, item: dict[str, Any]) -> bytes:
        replacement = tuple(int(token) for token in item.pop("replacement", ()))
        runs = tuple((int(a), int(b)) for a, b in item.pop("embed_runs", ()))
        if not replacement:
            raise BadItem("replacement is missing: the token ids the placeholder expands to")
        if not runs:
            info = self._info.placeholder(modality)
            if info is None:
                raise BadItem(f"this model takes no {MODALITIES[modality]} input")
            runs = runs_of(replacement, info.embed_token_id)
        fields = {name: as_array(name, value) for name, value in item.items()}
        return pack_item(modality, replacement, runs, fields)


def as_array(name: str, value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """(torch dtype name, array) of a numpy array, an InjectedField or a torch tensor."""
    if isinstance(value, InjectedField):
        if value.dtype not in ITEM_SIZES:
            raise BadItem(f"field {name}: unknown dtype {value.dtype}")
        kind = "uint16" if value.dtype == "bfloat16" else value.dtype
        return value.dtype, np.frombuffer(value.data, dtype=kind).reshape(value.shape)
    kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if kind == "bfloat16":  # numpy has none: the bits travel as uint16
        value = value.view(_same_module(value).uint16)
    if kind not in ITEM_SIZES:
        raise BadItem(f"field {name}: unknown dtype {kind or type(value).__name__}")
    return kind, np.asarray(value)


def _same_module(value: Any) -> Any:
    """torch, when the caller's tensor comes from it; this process does not import it itself."""
    import sys

    return sys.modules[type(value).__module__.partition(".")[0]]


def _mapping(item: InjectedItem) -> dict[str, Any]:
    made: dict[str, Any] = dict(item.fields)
    made["replacement"] = item.replacement
    if item.embed_runs:
        made["embed_runs"] = item.embed_runs
    return made
