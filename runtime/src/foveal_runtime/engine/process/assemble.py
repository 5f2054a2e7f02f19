"""Puts an engine's parts together from its configuration and the loaded model.

Used by main/ (inside `EngineServer.run`'s make_core) and by tests with a FakeRunner. Derives every
limit; starts nothing and opens nothing but the warm set of the last process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foveal_runtime.engine.caches.warm import WarmSet
from foveal_runtime.engine.events.log import EventLog, ObservedReceiver
from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.engine.process.evidence import StepRecord
from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.limits import SchedulerLimits
from foveal_runtime.engine.types.step import ModelRunner
from foveal_runtime.mirror.messages import DownMessage
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.plan.budget.encoder import EncoderBudget, LargestItem, compute_encoder_budget
from foveal_runtime.plan.config import EngineConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import EngineInfo

# Tokens of a step times bytes of a value, 256 in float32 and 512 in bfloat16, that take a CPU some
# tenths of a second, in which streams stand still; a GPU is through with a full step before a
# reader notices. See docs/decisions/scheduling.md.
CPU_MIXED_BYTES = 1024
CPU_MIXED_GROWTH = 30.0
"""A step beside streams takes at most so many times what it takes without prompts, and 0.6 s."""
CPU_SHORT_GROWTH = 2.0
"""The same beside short texts, until many of them wait."""
UNTOUCHED_RESERVE = 0.875
"""Share of the KV blocks that wait until they are of use where memory is not taken at the start:
taking a GiB costs a CPU 0.1 to 2.5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A model that is ready to run.

    Attributes:
        num_blocks: KV blocks of config.caches.block_size that the runner has, TRASH_BLOCK
            included.
        max_model_len: prompt + output tokens, at most what the model takes.
        largest: the largest item of each modality that is enabled and that the model takes.
        largest_request_bytes: serialised items of the largest request under the limits; 0 = not
            known.
        namespace: names weights and processor; frontends must present the same.
        kv_block_bytes: of one KV block. num_snapshots: of recurrent state that the runner can keep.
        num_window_blocks, window: see SchedulerLimits.
    """

    runner: ModelRunner
    num_blocks: int
    max_model_len: int
    largest: Mapping[str, LargestItem]
    largest_request_bytes: int = 0
    namespace: bytes = b""
    revision: str = ""
    kv_block_bytes: int = 0
    num_snapshots: int = 0
    num_window_blocks: int = 0
    window: int = 0


def encoder_budget(config: EngineConfig, loaded: LoadedEngine) -> EncoderBudget:
    """The encoder's budgets of this engine. Raises StartupError."""
    settings = config.scheduler
    derived = settings.max_num_batched_tokens
    try:
        return compute_encoder_budget(
            is_multimodal=loaded.runner.traits.is_multimodal,
            largest=loaded.largest,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_encoder_input_tokens=settings.max_num_encoder_input_tokens or derived,
            encoder_cache_size=config.caches.encoder_embeds or derived,
            disable_chunked_mm_input=settings.disable_chunked_mm_input
            or loaded.runner.traits.bidirectional != "none",
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def scheduler_limits(config: EngineConfig, loaded: LoadedEngine) -> SchedulerLimits:
    """Everything the scheduler may hand out. Raises StartupError."""
    settings, caches, traits = config.scheduler, config.caches, loaded.runner.traits
    budget = encoder_budget(config, loaded)
    guesses = settings.num_speculative_tokens
    if guesses and traits.state_bytes:
        raise StartupError(
            f"num_speculative_tokens {guesses}: a recurrent state cannot take back a wrong guess; "
            "set it to 0 for this model"
        )
    if loaded.num_blocks < 2:
        raise StartupError(
            f"caches.kv_bytes = {caches.kv_bytes} does not hold two blocks of "
            f"{caches.block_size} tokens: raise it"
        )
    is_cpu, is_bounded = config.device == "cpu", settings.max_num_mixed_tokens > 0
    reserve = UNTOUCHED_RESERVE if is_cpu and not caches.kv_touched else 0.0
    mixed = CPU_MIXED_BYTES // traits.value_bytes if is_cpu else 0
    return SchedulerLimits(
        num_blocks=loaded.num_blocks,
        num_reserved_blocks=int(reserve * (loaded.num_blocks - 1)),
        block_size=caches.block_size,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_mixed_tokens=settings.max_num_mixed_tokens or mixed,
        target_itl_seconds=settings.target_itl_ms / 1000,
        mixed_growth=CPU_MIXED_GROWTH if is_cpu and not is_bounded else 0.0,
        short_growth=CPU_SHORT_GROWTH if is_cpu and not is_bounded else 0.0,
        slices_encoding=is_cpu and config.tensor_parallel == 1,
        num_speculative_tokens=guesses,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(loaded.max_model_len, (loaded.num_blocks - 1) * caches.block_size),
        max_waiting=settings.max_waiting,
        policy=settings.policy,
        disable_chunked_mm_input=settings.disable_chunked_mm_input,
        encoder_compute_embeds=budget.compute_embeds,
        encoder_cache_embeds=budget.cache_embeds,
        encoder_host_bytes=caches.encoder_host_bytes,
        encoder_eviction=caches.encoder_eviction,
        prefix_caching=caches.prefix_caching,
        namespace=loaded.namespace,
        kv_dtype=caches.kv_dtype,
        num_snapshots=loaded.num_snapshots,
        snapshot_tokens=_snapshot_tokens(config, loaded),
        num_window_blocks=loaded.num_window_blocks,
        window=loaded.window,
    )


def _snapshot_tokens(config: EngineConfig, loaded: LoadedEngine) -> int:
    """Tokens whose KV takes a quarter of the memory of a state: closer together, snapshots would
    cost more than the tokens that they save."""
    state_bytes = loaded.runner.traits.state_bytes
    return state_bytes * config.caches.block_size // max(4 * loaded.kv_block_bytes, 1)


def assemble_core(
    config: EngineConfig,
    loaded: LoadedEngine,
    *,
    send: Callable[[str, DownMessage], None],
    clock: Callable[[], float] = time.monotonic,
    events: EventLog | None = None,
    boot: int | None = None,
    record: StepRecord | None = None,
) -> EngineCore:
    """An engine's core; `send` is usually EngineServer.send. Raises StartupError."""
    limits = scheduler_limits(config, loaded)
    info = EngineInfo(
        engine_id=config.engine_id,
        model=config.model.served_name,
        revision=loaded.revision or config.model.revision,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        grammars=loaded.runner.traits.grammars,
        pools=True,
        loras=loaded.runner.loras.refs,
    )
    receiver = ObservedReceiver(
        ReceiverLimits(
            capacity_bytes=config.caches.ipc_bytes,
            staging_bytes=config.caches.ipc_staging_bytes,
            largest_request_bytes=loaded.largest_request_bytes,
        ),
        namespace=loaded.namespace,
        boot=time.time_ns() if boot is None else boot,
        # Without a folder nothing can be opened here: frontends must send bytes.
        node=config.node if config.shm_directory else "",
        info=codec.encode_info(info),
        death=record.last if record else None,
    )
    if events is not None:
        receiver.observe(events)
    scheduler = Scheduler(limits, loaded.runner.traits, clock=clock, observer=events)
    warm = None
    caches, traits = config.caches, loaded.runner.traits
    if caches.warm_directory and traits.embed_bytes:
        warm = WarmSet(
            caches.warm_directory, caches.warm_bytes, namespace=loaded.namespace, traits=traits
        )
    core = EngineCore(
        scheduler, loaded.runner, receiver, send=send, clock=clock, events=events, warm=warm,
        unpin_encoded=caches.unpin_at == "encoded",
        run_ahead=config.runs_ahead, record=record,
    )  # fmt: skip
    core.load_warm_set()
    return core
