"""Implementations of `items.interfaces` without media, sockets or engines, for tests and demos.

FakeGenerator echoes scripted tokens; FakeInputProcessor counts placeholders and makes sources that
count their releases.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from foveal_runtime.frontend.items.interfaces import EnginesLoad
from foveal_runtime.frontend.items.prepared import (
    MediaPart,
    PreparedItem,
    PreparedRequest,
    PrepareOptions,
)
from foveal_runtime.frontend.items.source import GivenBytes, Page
from foveal_runtime.mirror.sender import SendItem, SendValue
from foveal_runtime.plan.errors import FovealError, InvalidRequest, MediaUnknown
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.media import MODALITIES, ItemMeta, MMHash, Modality
from foveal_runtime.wire.messages import EngineOutput, FirstOutput, TokenLogprobs

Script = Callable[[PreparedRequest], Sequence[int]]
"""The output tokens of a request, the terminal one not included."""


def fake_embedding(token_ids: Sequence[int], pooling: str) -> bytes:
    """Four f32 values that depend on the tokens and the pooling."""
    kind = {"mean": sum(token_ids) / len(token_ids), "last": token_ids[-1], "cls": token_ids[0]}
    return array("f", [kind[pooling], len(token_ids), 1.0, -2.0]).tobytes()


class NoEngines:
    """What engine sessions know before the first of them: nothing."""

    def lookup_item(self, mm_hash: MMHash) -> tuple[int, ItemMeta] | None:
        return None

    def lookup_alias(self, alias: bytes) -> bytes | None:
        return None

    def max_model_len(self) -> int:
        return 0

    def has_cache(self) -> bool:
        return False

    def put(self, items: Sequence[SendItem], values: dict[MMHash, SendValue]) -> int:
        return 0


@dataclass(slots=True)
class FakeGenerator:
    """Emits `script(request)` one token at a time, then EOS unless max_tokens ends it first.

    Attributes:
        hold: when set, tokens after the first wait for it.
        error_after: raise `error` after this many tokens.
        tokens_per_output: tokens in one output.
        running, finished, aborted: request ids.
    """

    script: Script
    eos_token_id: int
    context_tokens: int = 4096
    hold: asyncio.Event | None = None
    error: FovealError | None = None
    error_after: int = 0
    tokens_per_output: int = 1
    healthy: bool = True
    num_engines: int = 1
    adapters: dict[str, LoraRef] = field(default_factory=dict)
    requests: list[PreparedRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def generate(self, request: PreparedRequest) -> AsyncGenerator[EngineOutput, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        ended = False
        try:
            for num_before, output in self._outputs(request):
                if self.error is not None and num_before >= self.error_after:
                    raise self.error
                if self.hold is not None and num_before > 0:
                    await self.hold.wait()
                await asyncio.sleep(0)
                ended = bool(output.finish)
                yield output
        finally:
            self.running.discard(request.request_id)
            (self.finished if ended else self.aborted).append(request.request_id)
            for item in request.items:
                item.source.release()

    def _outputs(self, request: PreparedRequest) -> Iterator[tuple[int, EngineOutput]]:
        sampling = request.sampling
        if sampling.pooling:
            output = EngineOutput(
                (request.request_id, 0), finish="stop", first=self._first(request),
                embedding=fake_embedding(request.token_ids, sampling.pooling),
            )  # fmt: skip
            yield 0, output
            return
        tokens = list(self.script(request))
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.add(self.eos_token_id)
        tokens.append(self.eos_token_id)
        for index, token in enumerate(tokens):
            if token in stops and index >= sampling.min_tokens:
                tokens = tokens[: index + 1]
                break
        finish = "stop" if tokens[-1] in stops else "length"
        if len(tokens) > sampling.max_tokens:
            tokens, finish = tokens[: sampling.max_tokens], "length"
        size = self.tokens_per_output
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            last = start + size >= len(tokens)
            stop_token = chunk[-1] if last and finish == "stop" else None
            yield (
                start,
                EngineOutput(
                    rid=(request.request_id, 0),
                    token_ids=tuple(chunk),
                    finish=finish if last else "",
                    stop_token=stop_token if stop_token != self.eos_token_id else None,
                    first=self._first(request) if start == 0 else None,
                    logprobs=tuple(self._logprob(token, sampling.logprobs) for token in chunk)
                    if sampling.logprobs >= 0
                    else (),
                ),
            )

    def _logprob(self, token: int, num_top: int) -> TokenLogprobs:
        tops = tuple(token + i for i in range(num_top) if i < 2)
        return TokenLogprobs(-0.5, 1, tops, tuple(-0.5 - i for i in range(len(tops))))

    def _first(self, request: PreparedRequest) -> FirstOutput:
        ids = request.token_ids
        wants = request.sampling.prompt_logprobs
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        if wants >= 0:
            logprobs = (None, *(self._logprob(token, wants) for token in ids[1:]))
        return FirstOutput(
            num_prompt_tokens=len(ids),
            num_cached_tokens=0,
            num_mm_items=len(request.items),
            num_mm_hits=0,
            num_encoder_hits=0,
            queue_seconds=0.001,
            prefill_seconds=0.002,
            prompt_token_ids=array("I", ids).tobytes() if request.echo_prompt else b"",
            prompt_wide=True,
            prompt_logprobs=logprobs,
            prompt_logprob_ids=tuple(ids) if wants >= 0 else (),
        )

    async def health(self) -> bool:
        return self.healthy

    def num_ready_engines(self) -> int:
        return self.num_engines

    def load(self) -> EnginesLoad:
        return EnginesLoad(num_running=len(self.running), kv_usage=0.25)

    def loras(self) -> dict[str, LoraRef]:
        return self.adapters

    def max_model_len(self) -> int:
        return self.context_tokens


@dataclass(slots=True)
class FakeSource:
    """Counts its releases."""

    num_releases: int = 0

    async def value(self) -> bytes | memoryview:
        return b""

    def release(self) -> None:
        self.num_releases += 1


@dataclass(slots=True)
class FakeInputProcessor:
    """Takes any URL; a uuid-only part must have been seen with content before."""

    placeholders: dict[Modality, tuple[int, str]]
    warm: bool = True
    media_bytes: int = 0
    known_uuids: set[str] = field(default_factory=set)
    sources: list[FakeSource] = field(default_factory=list)
    documents: list[MediaPart] = field(default_factory=list)
    seen: list[tuple[tuple[MediaPart, ...], PrepareOptions]] = field(default_factory=list)

    def placeholder_token_id(self, modality: Modality) -> int | None:
        found = self.placeholders.get(modality)
        return None if found is None else found[0]

    def placeholder_text(self, modality: Modality) -> str | None:
        found = self.placeholders.get(modality)
        return None if found is None else found[1]

    def is_warm(self) -> bool:
        return self.warm

    async def pages(
        self, documents: Sequence[MediaPart], options: PrepareOptions
    ) -> list[Sequence[Page]]:
        """Two of each document."""
        self.documents += documents
        return [[Page(bytes(32), GivenBytes(b"%PDF"), i) for i in range(2)] for _ in documents]

    async def prepare(
        self, token_ids: list[int], parts: Sequence[MediaPart], options: PrepareOptions
    ) -> PreparedRequest:
        self.seen.append((tuple(parts), options))
        items: list[PreparedItem] = []
        for part in parts:
            if part.is_uuid_only and part.uuid not in self.known_uuids:
                raise MediaUnknown(f"{part.path}: nobody knows uuid {part.uuid!r}", param=part.path)
            if part.url is not None and not str(part.url).startswith(("http", "data:")):
                raise InvalidRequest(f"{part.path}: unknown URL scheme", param=part.path)
            if part.uuid is not None:
                self.known_uuids.add(part.uuid)
            options.charge_media_bytes(self.media_bytes)
            source = FakeSource()
            self.sources.append(source)
            modality = MODALITIES.index(part.modality)
            items.append(PreparedItem(bytes(32), modality, source))
        known = {ids for ids, _ in self.placeholders.values()}
        positions = [i for i, token in enumerate(token_ids) if token in known]
        return PreparedRequest(
            request_id=options.request_id,
            token_ids=token_ids,
            items=items,
            placements=list(zip(positions, range(len(items)), strict=True)),
            sampling=options.sampling,
            priority=options.priority,
            cache_salt=options.cache_salt.encode(),
            read_prefix_cache=options.read_prefix_cache,
            echo_prompt=options.echo_prompt,
            lora=options.lora,
        )
