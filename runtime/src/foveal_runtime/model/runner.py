"""Obeys step plans with a transformers model: the real `engine.step.ModelRunner`.

Made by main/ in an engine process, called by the engine's step loop, one thread at a time. Keeps
tokens and positions of running requests, KV memory and encoder outputs; decides nothing about
them. A request whose input cannot be computed ends up in `StepResult.failed`, and the others go on.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from foveal_runtime.engine.step import (
    ModelTraits,
    NewRequest,
    PromptLogprobs,
    StepPlan,
    StepResult,
)
from foveal_runtime.model.attention import (
    BackendRequest,
    KVPool,
    create_backend,
)
from foveal_runtime.model.batch import (
    Window,
    make_context,
    make_groups,
    make_ids,
    make_positions,
    make_windows,
)
from foveal_runtime.model.context import PagedCall, forward_context
from foveal_runtime.model.encoder import EncoderRunner, EncoderStore
from foveal_runtime.model.head import Head
from foveal_runtime.model.loader import LoadedModel, load_model
from foveal_runtime.model.packing import weight_bytes
from foveal_runtime.model.positions import prompt_positions
from foveal_runtime.model.probe import probe_layers
from foveal_runtime.model.sampler import Sampler, prompt_logprobs
from foveal_runtime.model.sequence import SequenceState
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.item import BadItem

_LOGPROB_ROWS = 256
"""Rows of logits alive at once for prompt logprobs: 256 rows of 150,000 floats are 154 MB."""


class TorchRunner:
    """One model on one device.

    The KV pool is allocated at once when `num_blocks` or `kv_bytes` is given, else by
    `allocate_kv`, so that a profiler can measure in between.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        device: str = "cpu",
        block_size: int = 16,
        num_blocks: int = 0,
        kv_bytes: int = 0,
        attention: str = "auto",
        sampler: Sampler | None = None,
    ) -> None:
        self.loaded = loaded
        self.device = torch.device(device)
        self.block_size = block_size
        self.head = Head(loaded.model, loaded.core_name)
        self.layers = probe_layers(loaded, self.head)
        self.backend = create_backend(
            attention, BackendRequest(self.layers, block_size, loaded.dtype, self.device)
        )
        self.store = EncoderStore(self.device)
        self.encoder = EncoderRunner(loaded, self.store, self.device)
        self._traits = read_traits(loaded)
        self._sampler = sampler or Sampler(self._traits.eos_token_ids)
        self._sequences: dict[str, SequenceState] = {}
        self._failed: dict[str, str] = {}
        self._pool: KVPool | None = None
        if num_blocks or kv_bytes:
            self.allocate_kv(num_blocks or kv_bytes // self.kv_block_bytes)

    @classmethod
    def load(
        cls, path: str, *, dtype: str = "auto", device: str = "cpu", **options: Any
    ) -> TorchRunner:
        """Loads the checkpoint directory `path`; `options` are those of the constructor.

        Raises StartupError.
        """
        return cls(load_model(path, dtype, device), device=device, **options)

    @property
    def traits(self) -> ModelTraits:
        return self._traits

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block, all layers of this rank."""
        values = sum(layer.values_per_token for layer in self.layers)
        return values * self.block_size * int(self.loaded.dtype.itemsize)

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers as loaded, shared ones once."""
        return weight_bytes(list(self.loaded.model.state_dict().values()))

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the trash block included: plans use ids 1 ... num_blocks - 1."""
        return 0 if self._pool is None else self._pool.num_blocks

    def allocate_kv(self, num_blocks: int) -> None:
        """Makes the KV pool; one of its blocks is trash and belongs to no request."""
        assert self._pool is None
        if num_blocks < 2:
            raise StartupError(
                f"KV memory holds {num_blocks} blocks of {self.kv_block_bytes} bytes; 2 is the "
                "least: give the KV cache more bytes"
            )
        self._pool = KVPool(
            self.layers, num_blocks, self.block_size, self.loaded.dtype, self.device
        )

    def execute(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        result = StepResult(plan.step)
        for request_id in plan.finished:
            self._sequences.pop(request_id, None)
            self._failed.pop(request_id, None)
        self.store.obey(plan)
        for request in plan.new:
            self._admit(request)
        if plan.encode:
            started = time.perf_counter()
            self.encoder.encode(plan.encode)
            self._synchronize()
            result.encode_seconds = time.perf_counter() - started
            result.failed_encodes = self.store.failures_of(one.mm_hash for one in plan.encode)
        windows = self._runnable(plan, result.failed)
        if windows:
            started = time.perf_counter()
            hidden = self.forward(windows)
            self._sample(windows, hidden, result)
            result.forward_seconds = time.perf_counter() - started
        return result

    def save_encoder(self, path: str, mm_hashes: Sequence[MMHash]) -> list[MMHash]:
        """See `ModelRunner`."""
        return self.store.save(path, mm_hashes)

    def load_encoder(
        self, path: str, device: Mapping[MMHash, int], host: Mapping[MMHash, int]
    ) -> list[MMHash]:
        """See `ModelRunner`."""
        shape = (self._traits.embed_levels, self._traits.embed_width)
        return self.store.load(path, device, host, shape, self.loaded.dtype)

    def close(self) -> None:
        """Gives up all memory of requests and caches; the runner cannot be used afterwards."""
        self._sequences.clear()
        self._pool = None
        self.store = EncoderStore(self.device)

    def check_integrity(self) -> None:
        self.store.check_integrity()
        for request_id, sequence in self._sequences.items():
            assert request_id == sequence.request_id
            assert 0 < sequence.num_prompt_tokens <= len(sequence.token_ids)

    def forward(self, windows: Sequence[Window]) -> torch.Tensor:
        """Hidden states (T, E) of a flat batch; writes its keys and values to the pool."""
        assert self._pool is not None
        adapter = self.loaded.adapter
        groups = make_groups(windows, adapter.bidirectional)
        if groups is not None:
            groups = groups.to(self.device)
        context = make_context(windows, self.backend, self._pool, groups, self.device)
        embeds, extra = self._embed(windows)
        positions = make_positions(windows, bool(adapter.rope), adapter.position_offset)
        with forward_context(PagedCall(self.layers, context, adapter)):
            output = self.loaded.decoder(
                inputs_embeds=embeds[None],
                position_ids=positions.to(self.device),
                use_cache=False,
                **extra,
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _admit(self, request: NewRequest) -> None:
        self._failed.pop(request.request_id, None)
        offsets = [one.placeholder.offset for one in request.mm_inputs]
        try:
            if offsets != sorted(offsets):
                raise BadItem("items are not in prompt order")
            positions, delta = prompt_positions(self.loaded.core, self.loaded.adapter, request)
        except BadItem as error:
            self._failed[request.request_id] = str(error)
            return
        self._sequences[request.request_id] = SequenceState(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            mm_inputs=request.mm_inputs,
            sampling=request.sampling,
            positions=positions,
            position_delta=delta,
        )

    def _runnable(self, plan: StepPlan, failed: dict[str, str]) -> list[Window]:
        """The plan's windows without requests that cannot go on; those are noted in `failed`."""
        alive = [s for s in plan.scheduled if s.request_id not in self._failed]
        windows = make_windows(alive, self._sequences)
        for window in windows:
            for one, *_ in window.embed_spans():
                if self.store.lookup(one.mm_hash) is None:
                    reason = self.store.lookup_failure(one.mm_hash)
                    self._failed[window.sequence.request_id] = reason
        for scheduled in plan.scheduled:
            if scheduled.request_id in self._failed:
                failed[scheduled.request_id] = self._failed[scheduled.request_id]
        if not failed:
            return windows
        return make_windows([s for s in alive if s.request_id not in failed], self._sequences)

    def _embed(self, windows: Sequence[Window]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Token embeddings (T, E) with encoder outputs in place, and deepstack arguments."""
        core: Any = self.loaded.core
        embeds: torch.Tensor = core.get_input_embeddings()(make_ids(windows).to(self.device))
        levels: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        for window in windows:
            for one, row, first, count in window.embed_spans():
                output = self.store.lookup(one.mm_hash)
                assert output is not None
                part = output[:, first : first + count]
                embeds[row : row + count] = part[0]
                if self.loaded.adapter.deepstack:
                    levels.append(part[1:])
                    rows.append(torch.arange(row, row + count, device=self.device))
        if not levels:
            return embeds, {}
        mask = torch.zeros(1, embeds.shape[0], dtype=torch.bool, device=self.device)
        mask[0, torch.cat(rows)] = True
        stacked = torch.cat(levels, dim=1)
        return embeds, {
            "visual_pos_masks": mask,
            "deepstack_visual_embeds": list(stacked.unbind(0)),
        }

    def _sample(self, windows: Sequence[Window], hidden: torch.Tensor, result: StepResult) -> None:
        for window in windows:
            if window.sequence.sampling.prompt_logprobs >= 0:
                scored = self._prompt_logprobs(window, hidden)
                if scored is not None:
                    result.prompt_logprobs.append(scored)
        chosen = [w for w in windows if w.scheduled.sample]
        if not chosen:
            return
        last = torch.tensor(
            [w.base + w.scheduled.num_scheduled_tokens - 1 for w in chosen], device=self.device
        )
        logits = self.head.logits(hidden[last])
        sequences = [w.sequence for w in chosen]
        result.sampled = self._sampler.sample(logits, sequences, result.failed)
        for sampled in result.sampled:
            self._sequences[sampled.request_id].token_ids.append(sampled.token_id)

    def _prompt_logprobs(self, window: Window, hidden: torch.Tensor) -> PromptLogprobs | None:
        """Scores of the prompt tokens that follow the window's positions."""
        sequence = window.sequence
        end = min(window.hi, sequence.num_prompt_tokens - 1)
        merged = PromptLogprobs(sequence.request_id, window.lo, (), (), (), ())
        for lo in range(window.lo, end, _LOGPROB_ROWS):
            hi = min(lo + _LOGPROB_ROWS, end)
            rows = hidden[window.base + lo - window.lo : window.base + hi - window.lo]
            part = prompt_logprobs(
                sequence.request_id,
                lo,
                self.head.logits(rows),
                sequence.token_ids[lo + 1 : hi + 1],
                sequence.sampling.prompt_logprobs,
            )
            merged.logprobs += part.logprobs
            merged.ranks += part.ranks
            merged.top_ids += part.top_ids
            merged.top_logprobs += part.top_logprobs
        return merged if merged.logprobs else None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def read_traits(loaded: LoadedModel) -> ModelTraits:
    """What the scheduler must know, from the model's configuration and its adapter."""
    text, adapter = loaded.text_config, loaded.adapter
    levels = 1
    if adapter.deepstack:
        levels += len(loaded.config.vision_config.deepstack_visual_indexes)
    eos = getattr(loaded.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(text, "eos_token_id", None)
    ids = (eos,) if isinstance(eos, int) else tuple(eos or ())
    multimodal = bool(adapter.encoders)
    return ModelTraits(
        vocab_size=int(text.vocab_size),
        max_position=int(text.max_position_embeddings),
        eos_token_ids=ids,
        is_multimodal=multimodal,
        bidirectional=adapter.bidirectional,
        embed_width=int(text.hidden_size) if multimodal else 0,
        embed_levels=levels,
        embed_bytes=int(text.hidden_size) * levels * loaded.dtype.itemsize if multimodal else 0,
        embed_kind=f"{loaded.dtype} transformers {transformers.__version__}",
    )
