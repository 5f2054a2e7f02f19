"""Obeys step plans with a transformers model: the real `engine.step.ModelRunner`.

Made by main/ in an engine process, called by the engine's step loop, one thread at a time. Keeps
tokens and positions of running requests, KV memory and encoder outputs; decides nothing about
them. A request whose input cannot be computed ends up in `StepResult.failed`, and the others go on.

`submit` gives the device a step's work and returns; `SubmittedStep.result` is the one place that
waits for it. A second step may be submitted before the first one's result was taken: the tokens
that it continues are then read on the device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from foveal_runtime.engine.types.step import (
    GrammarStats,
    NewRequest,
    StepPlan,
    StepResult,
)
from foveal_runtime.model.attention import (
    BackendRequest,
    ForwardContext,
    KVPool,
    create_backend,
    kv_dtypes,
    window_of,
    windowed_layers,
)
from foveal_runtime.model.checkpoint.experts import quantized_experts
from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.checkpoint.loader import LoadedModel, load_model
from foveal_runtime.model.checkpoint.probe import probe_layers, probe_states
from foveal_runtime.model.cpu.packing import weight_bytes
from foveal_runtime.model.device import Device, open_device, present
from foveal_runtime.model.layers.forward import Forward
from foveal_runtime.model.layers.last_layer import WantedRows
from foveal_runtime.model.layers.lora import Loras
from foveal_runtime.model.layers.state import States
from foveal_runtime.model.runner.batch import (
    HostBatch,
    TokenWindow,
    is_decode,
    make_batch,
    make_windows,
    rows_of_loras,
)
from foveal_runtime.model.runner.embedding import TokenEmbedding
from foveal_runtime.model.runner.encoder import EncoderRunner, EncoderStore
from foveal_runtime.model.runner.graphs import Capturer, DecodeGraphs, capture_sizes
from foveal_runtime.model.runner.sequence import PENDING, SequenceState, prompt_positions
from foveal_runtime.model.runner.submitted_step import (
    StepPool,
    SubmittedStep,
    pool_spans,
    score_prompt,
)
from foveal_runtime.model.runner.traits import read_traits
from foveal_runtime.model.sampling.grammar import Grammars
from foveal_runtime.model.sampling.sampler import Sampler
from foveal_runtime.plan.config import Quantization
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.item import BadItem

_log = logging.getLogger(__name__)


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
        lora_bytes: int = 0,
        kv_dtype: str = "auto",
        attention: str = "auto",
        sampler: Sampler | None = None,
        room: Device | None = None,
    ) -> None:
        self.loaded = loaded
        self.device = torch.device(device)
        self.room = room or open_device(self.device)
        self.block_size = block_size
        self.head = Head(loaded.model, loaded.core_name)
        self.layers = probe_layers(loaded, self.head)
        self.states = States(loaded, probe_states(loaded, self.head))
        self._kv_dtype, self._attention_dtype = kv_dtypes(kv_dtype, loaded.dtype)
        self.backend = create_backend(
            attention,
            BackendRequest(
                self.layers, block_size, self._attention_dtype, self.device, self._kv_dtype
            ),
        )
        self.store = EncoderStore(self.room)
        self.encoder = EncoderRunner(loaded, self.store, self.room)
        self.embedding = TokenEmbedding(loaded, self.store)
        self.traits = read_traits(loaded, self.states.slot_bytes)
        grammars = Grammars.open(loaded.path, self.traits)
        self.grammars = grammars.stats if grammars is not None else GrammarStats()
        self._sampler = sampler or Sampler(self.traits.eos_token_ids, grammars)
        self._sequences: dict[str, SequenceState] = {}
        self._failed: dict[str, str] = {}
        self._pool: KVPool | None = None
        self._graphs: DecodeGraphs | None = None
        self.forward = Forward(loaded, self.layers, self.states, self.backend)
        self.loras = Loras(loaded, lora_bytes)
        self._drawn: torch.Tensor | None = None  # ids of the last step's draw, on the device
        if num_blocks or kv_bytes:
            self.allocate_kv(num_blocks or kv_bytes // self.kv_block_bytes)

    @classmethod
    def load(
        cls, path: str, *, dtype: str = "auto", device: str = "cpu",
        quantization: Quantization = "auto", max_model_len: int = 0, **options: Any,
    ) -> TorchRunner:  # fmt: skip
        """Loads the checkpoint directory `path`; `options` are the constructor's. Raises
        StartupError."""
        open_device(torch.device(present(device)))  # kernels are tried while weights are laid out
        loaded = load_model(path, dtype, device, quantization, max_model_len)
        return cls(loaded, device=device, **options)

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block, all layers of this rank."""
        values = sum(layer.values_per_token for layer in self.layers)
        return values * self.block_size * int(self._kv_dtype.itemsize)

    @property
    def window(self) -> int:
        """Tokens that layers see which may have blocks of their own; 0: there are none such."""
        return 0 if self.states.shapes else window_of(self.layers)

    @property
    def window_block_bytes(self) -> int:
        """The part of `kv_block_bytes` that those layers take; 0: there are none such."""
        windowed = windowed_layers(self.layers) if self.window else frozenset[int]()
        values = sum(one.values_per_token for one in self.layers if one.index in windowed)
        return values * self.block_size * int(self._kv_dtype.itemsize)

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the KV pool, or of both, as they are there."""
        return 0 if self._pool is None else self._pool.size_bytes

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers as loaded, shared ones once."""
        return weight_bytes(list(self.loaded.model.state_dict().values()))

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the trash block included: plans use ids 1 ... num_blocks - 1."""
        return 0 if self._pool is None else self._pool.num_blocks

    @property
    def num_window_blocks(self) -> int:
        """Of the pool of layers with a sliding window; 0: there is one pool."""
        return 0 if self._pool is None else self._pool.num_window_blocks

    def allocate_kv(
        self,
        num_blocks: int,
        *,
        num_sequences: int = 16,
        num_snapshots: int = 0,
        num_window_blocks: int = 0,
        is_touched: bool = True,
    ) -> None:
        """Makes the KV pool; one of its blocks is trash and belongs to no request. On a CPU, one
        that is not touched takes memory as it fills. `num_sequences` may have a recurrent state
        at once, where the model has such, and so many snapshots of one are kept. With
        `num_window_blocks`, layers with a sliding window have so many blocks of their own."""
        assert self._pool is None
        if num_blocks < 2:
            raise StartupError(
                f"KV memory holds {num_blocks} blocks of {self.kv_block_bytes} bytes; 2 is the "
                "least: give the KV cache more bytes"
            )
        self._pool = KVPool(
            self.layers,
            num_blocks,
            self.block_size,
            self._kv_dtype,
            self.device,
            self._attention_dtype,
            is_touched=is_touched,
            num_window_blocks=num_window_blocks,
        )
        self.states.allocate(
            num_sequences, self.device, num_snapshots=num_snapshots, is_touched=is_touched
        )
        self.forward.find_ways(self._pool, self.backend, self.device)

    def record_decoding(self, capturer: Capturer, *, max_num_seqs: int, max_model_len: int) -> bool:
        """Records decode steps of up to `max_num_seqs` sequences, once there is a pool; False, with
        a warning, where this model or backend cannot be."""
        assert self._pool is not None
        if self.head.is_missing:
            return False  # there are no such steps
        if reason := self._why_not_recorded(capturer):
            _log.warning("decode steps are not recorded as graphs: %s", reason)
            return False
        graphs = DecodeGraphs(
            self._compute_logits,
            self.room,
            self.backend,
            self._pool,
            sizes=capture_sizes(max_num_seqs),
            max_blocks=-(-max_model_len // self.block_size),
            mrope=self.loaded.rope_axes,
            has_fractions=self.loaded.adapter.has_fractions,
            has_state=bool(self.states.shapes),
        )
        try:
            with torch.inference_mode():
                graphs.record(capturer)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            _log.warning("decode steps are not recorded as graphs: %s", reason)
            return False
        self._graphs = graphs
        return True

    def _why_not_recorded(self, capturer: Capturer) -> str:
        if capturer.is_frozen and quantized_experts(self.loaded.model):
            return "the host reads which of the quantised experts a step needs"
        if capturer.is_frozen and not self.backend.is_static:
            return "this attention backend reads lengths on the host"
        if self.states.shapes and not self.states.has_steps:
            return "the model has recurrent state that no kernel of this device advances"
        return ""

    @property
    def num_graph_steps(self) -> int:
        """Steps that were played from a recording."""
        return 0 if self._graphs is None else self._graphs.num_played

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    def submit(self, plan: StepPlan, between: Callable[[], None] | None = None) -> SubmittedStep:
        """Gives the device the plan's work. Results are taken in the order of submission; at most
        one step may be running when this is called."""
        with torch.inference_mode():
            return self._submit(plan, between)

    def _submit(self, plan: StepPlan, between: Callable[[], None] | None) -> SubmittedStep:
        step = SubmittedStep(StepResult(plan.step))
        result = step.partial
        for request_id in plan.finished:
            self._sequences.pop(request_id, None)
            self._failed.pop(request_id, None)
            if self.states.pool is not None:
                self.states.pool.close(request_id)
        self.store.obey(plan)
        for request in plan.new:
            self._admit(request)
        if plan.encode:
            step.encoding = self.room.stopwatch()
            step.encoding.stop(self.encoder.encode(plan.encode, plan.slice_seconds, between))
            result.failed_encodes = self.store.failures_of(one.mm_hash for one in plan.encode)
        windows = self._runnable(plan, result.failed)
        if windows:
            step.computing = self.room.stopwatch()
            self._compute(windows, step)
            self.states.save(w.scheduled for w in windows)
            step.computing.stop()
        step.start_fetch(self.room)
        return step

    def save_encoder(self, path: str, mm_hashes: Sequence[MMHash]) -> list[MMHash]:
        """See `ModelRunner`."""
        return self.store.save(path, mm_hashes)

    def load_encoder(
        self, path: str, device: Mapping[MMHash, int], host: Mapping[MMHash, int]
    ) -> list[MMHash]:
        """See `ModelRunner`."""
        shape = (self.traits.embed_levels, self.traits.embed_width)
        return self.store.load(path, device, host, shape, self.loaded.dtype)

    def close(self) -> None:
        """Gives up all memory of requests and caches; the runner cannot be used afterwards."""
        self._sequences.clear()
        self._pool = self.states.pool = None
        self._graphs = None
        self.forward.decoder_layers = None
        self.store = EncoderStore(self.room)

    def check_integrity(self) -> None:
        self.store.check_integrity()
        for request_id, sequence in self._sequences.items():
            assert request_id == sequence.request_id
            assert 0 < sequence.num_prompt_tokens <= len(sequence.token_ids)
        if self.states.pool is not None:
            self.states.pool.check_integrity(list(self._sequences))

    def _compute(self, windows: Sequence[TokenWindow], step: SubmittedStep) -> None:
        """Everything between embeddings and the draw of new tokens."""
        adapter = self.loaded.adapter
        batch = make_batch(
            windows,
            self.block_size,
            bidirectional=adapter.bidirectional,
            mrope=self.loaded.rope_axes,
            has_fractions=adapter.has_fractions,
            position_offset=adapter.position_offset,
            placeholder_id=self.loaded.placeholder_id,
        )
        spans = pool_spans(windows)
        chosen = [w for w in windows if w.scheduled.sample and not w.sequence.sampling.pooling]
        loras = any(window.sequence.lora is not None for window in windows)
        if self._graphs and not loras and is_decode(windows) and self._graphs.can_run(batch):
            states = self.states.advance([w.scheduled for w in windows])
            logits = self._graphs.run(batch, self._drawn, states)
        else:
            last = [w.base + w.scheduled.num_scheduled_tokens - 1 for w in chosen]
            scored = [w for w in windows if w.sequence.sampling.prompt_logprobs >= 0]
            is_whole = bool(scored) or any(span.num_rows > 1 for span in spans)
            wanted = last if is_whole else last + [span.first for span in spans if span.num_rows]
            hidden, rows = self._forward(windows, batch, np.array(wanted, np.int64), is_whole)
            for window in scored:
                step.scores += score_prompt(window, hidden, self.head, self.room)
            if spans:
                step.pool = StepPool(spans, hidden, None if is_whole else len(last))
            if not chosen:
                self._drawn = None
                return
            logits = self.head.logits(hidden[rows] if is_whole else hidden[: len(last)])
        sequences = [w.sequence for w in chosen]
        guesses = [w.guess for w in chosen]
        step.draw = self._sampler.launch(logits, sequences, self.room, guesses)
        self._drawn = step.draw.ids
        for row, sequence in enumerate(sequences):
            if guesses[row] is None:
                step.drawn.append((sequence, len(sequence.token_ids)))
                sequence.pending_row = row
                sequence.token_ids.append(PENDING)

    def _forward(
        self, windows: Sequence[TokenWindow], batch: HostBatch, last: np.ndarray, is_whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of a flat batch, of all rows (T, E) or of `last` (n, E), and `last` on the
        device; writes keys and values of all rows to the pool."""
        assert self._pool is not None
        assert batch.block_table.max() < self._pool.num_blocks
        assert bool(batch.windowed) == bool(self._pool.windowed)
        mask = self.embedding.deepstack(windows, len(batch.ids))
        rules = np.zeros(0, np.int32) if batch.groups is None else batch.groups
        (ids, positions, slots, starts, lens, table, owner, place, groups, pending, media,
         rows, *windowed) = self.room.upload(
            batch.ids, batch.positions, batch.slots, batch.q_start, batch.seq_lens,
            batch.block_table, batch.seq_of_token, batch.pos_of_token, rules, batch.pending, mask,
            last, *batch.windowed,
        )  # fmt: skip
        if batch.pending.size:
            assert self._drawn is not None
            ids.index_copy_(0, pending[0], self._drawn[pending[1]])
        context = ForwardContext(
            backend=self.backend,
            pool=self._pool,
            q_start=starts,
            seq_lens=lens,
            block_table=table,
            slots=slots,
            seq_of_token=owner,
            pos_of_token=place,
            q_lens=batch.q_lens,
            kv_lens=batch.kv_lens,
            groups=None if batch.groups is None else groups,
            state_slots=self.states.advance([w.scheduled for w in windows]),
            windowed=tuple(windowed),
        )
        extra = self.embedding.arguments(ids, windows, media)
        wanted = WantedRows(rows, (batch.pos_of_token[last] + 1).tolist())
        embeds = self.embedding.embed(ids, windows)
        hidden = self.forward(
            embeds, positions, context, extra, None if is_whole else wanted,
            rows_of_loras(windows, self.room),
        )  # fmt: skip
        return hidden, rows

    def _compute_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """What a decode step's recording holds."""
        extra = self.loaded.layer_inputs(ids)
        embeds = self.loaded.embed_tokens(ids)
        return self.head.logits(self.forward(embeds, positions, context, extra))

    def _admit(self, request: NewRequest) -> None:
        self._failed.pop(request.request_id, None)
        offsets = [one.placeholder.offset for one in request.mm_inputs]
        lora = self.loras.find(request.lora)
        try:
            if request.lora and lora is None:
                raise BadItem("its LoRA adapter was unloaded")
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
            positions=None if positions is None else positions.numpy(),
            position_delta=delta,
            lora=lora,
        )
        if self.states.pool is not None:
            self.states.pool.open(request.request_id, request.snapshot)

    def _runnable(self, plan: StepPlan, failed: dict[str, str]) -> list[TokenWindow]:
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
