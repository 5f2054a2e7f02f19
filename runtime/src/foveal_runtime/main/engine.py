"""One engine process: model, caches, scheduler and socket, put together and taken down.

Started by `foveal-runtime engine --config`. Sets thread counts before torch is imported, loads and
warms the model while /livez already answers, serves until SIGTERM (drain) or SIGINT (stop).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from foveal_runtime.engine.events.log import EventLog
from foveal_runtime.engine.events.stream import TOPIC, EventStream
from foveal_runtime.engine.events.vllm import VllmEventLog
from foveal_runtime.engine.process.assemble import LoadedEngine, assemble_core
from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.engine.process.evidence import StepRecord
from foveal_runtime.engine.process.metrics import EngineMetrics
from foveal_runtime.engine.process.server import EngineServer
from foveal_runtime.engine.types.step import (
    TRASH_BLOCK,
    ModelRunner,
    NewRequest,
    ScheduledRequest,
    StepPlan,
)
from foveal_runtime.model.checkpoint.weights import told_loading
from foveal_runtime.model.cpu import threads
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.budget.kv import KVBlocks, KVShape
from foveal_runtime.plan.config import EngineConfig, ItemSize, load
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.lora import check_lora_names
from foveal_runtime.plan.profile import ItemProfile
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.telemetry.deferred import defer
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.telemetry.memory import (
    ContainerMemory,
    keep_free_blocks,
    release_free_memory,
    without_collections,
)
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.startup import StartPhases
from foveal_runtime.wire.namespace import model_namespace
from foveal_runtime.wire.shm import SharedReader
from foveal_runtime.wire.transport import ZmqRouter

if TYPE_CHECKING:
    from foveal_runtime.model.parallel.tensor_parallel import TensorParallelRunner
    from foveal_runtime.model.runner.runner import TorchRunner


log = logging.getLogger(__name__)


def run(path: str) -> int:
    config = load(path, EngineConfig)
    assert isinstance(config, EngineConfig)
    configure_logging(config.log_format, process=config.engine_id)
    threads.configure(config.num_threads)
    raise_file_limit()
    return serve(config)


def raise_file_limit() -> None:
    """Links and shared values keep a descriptor each. The soft limit, often 1,024, protects
    programs that call select() on any of them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(config: EngineConfig) -> int:
    """Runs the process to its end; returns its exit code. Raises StartupError."""
    metrics = Metrics(
        "engine",
        model_name=config.model.served_name,
        process=config.engine_id,
        engine=config.engine_id,
        max_model_len=config.model.max_model_len,
    )
    server = EngineServer(
        http_host=config.http_host,
        http_port=config.http_port,
        engine_id=config.engine_id,
        drain_timeout_seconds=config.drain_timeout_seconds,
        idle_check_seconds=config.idle_check_seconds,
        render_metrics=metrics.exposition,
    )
    memory = ContainerMemory()
    phases = StartPhases()
    metrics.add_source(memory.collect)
    metrics.add_source(phases.collect)
    stream, events = event_stream(config)
    boot = time.time_ns()
    record = StepRecord(boot, _record_path(config))
    if record.last is not None:
        log.warning(
            "the last process ended in the middle of its work",
            extra={"num_suspects": len(record.last.suspects), "crash": record.crash},
        )
    record.watch_crashes()
    signal.signal(signal.SIGTERM, lambda *_: server.request_drain())
    signal.signal(signal.SIGINT, lambda *_: server.request_stop())

    def make_core() -> EngineCore:
        loaded = load_engine(config, phases)
        core = assemble_core(
            config, loaded, send=server.send, events=events, boot=boot, record=record
        )
        phases.done("caches")
        metrics.add_source(EngineMetrics(core, stream=stream).collect)
        metrics.add_source(functools.partial(_measured, core, memory, config.device))
        return core

    shared = SharedReader(Path(config.shm_directory)) if config.shm_directory else None
    if stream is not None:
        stream.start()
    code = 1
    try:
        code = server.run(
            make_core,
            lambda: ZmqRouter(config.bind, keys=config.curve),
            open_shared=shared.open if shared else None,
            on_ready=lambda endpoint: log.info("ready", extra={"endpoint": endpoint}),
            last_death=record.last,
        )
    finally:
        if stream is not None:
            stream.close()
        if code == 0 or not record.is_busy:
            record.close()
    return code


def event_stream(config: EngineConfig) -> tuple[EventStream, EventLog] | tuple[None, None]:
    """The stream of cache events and what fills it; not started."""
    if not config.events_bind:
        return None, None
    is_vllm = config.events_format == "vllm"
    stream = EventStream(
        config.events_bind,
        keys=None if config.events_plain else config.curve,
        topic=config.events_topic.encode() or (b"" if is_vllm else TOPIC),
        first=0 if is_vllm else 1,
        plain=config.events_plain,
    )
    make = VllmEventLog if is_vllm else EventLog
    return stream, make(config.engine_id, stream.publish)


def _record_path(config: EngineConfig) -> Path | None:
    """Of this engine and user, where it outlives the process: in a pod, its own volume. Engines of
    several containers may share the folder, and the port too. None where no folder for temporary
    files can be written to."""
    own = (socket.gethostname(), config.engine_id, config.bind, config.model.path)
    name = hashlib.blake2b("\0".join(own).encode(), digest_size=8).hexdigest()
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        log.warning("what kills this engine will not be known: %s", error)
        return None
    return folder / f"foveal-{os.getuid()}-engine-{name}.step"


def _measured(core: EngineCore, memory: ContainerMemory, device: str, metrics: Metrics) -> None:
    """What the budgets' parts really take, by their names in the resource's status."""
    from foveal_runtime.model.device import device_peak_bytes
    from foveal_runtime.model.parallel.tensor_parallel import TensorParallelRunner
    from foveal_runtime.model.runner.runner import TorchRunner

    runner, encoder = core.runner, core.scheduler.encoder
    parts = {
        "ipc": core.receiver.store.capacity_bytes,
        "encoder": encoder.cache_size * runner.traits.embed_bytes,
        "encoderHost": encoder.host.capacity_bytes,
        "enginePodMemory": memory.peak_bytes(),
        "deviceMemory": device_peak_bytes(device),
    }
    if isinstance(runner, TorchRunner | TensorParallelRunner):  # of one device, as planned
        parts["weights"] = runner.weight_bytes
        parts["kv"] = runner.kv_pool_bytes
        state_bytes = runner.traits.state_bytes
        parts["loras"] = runner.loras.num_bytes
        parts["state"] = core.scheduler.limits.max_num_seqs * state_bytes
        parts["snapshots"] = core.scheduler.limits.num_snapshots * state_bytes
    for part, size in parts.items():
        if size:
            metrics.set("foveal_budget_bytes", size, part=part, source="measured")


def kv_blocks(
    config: EngineConfig,
    max_model_len: int,
    rank_block_bytes: int,
    rank_window_bytes: int = 0,
    window: int = 0,
) -> KVBlocks:
    """Blocks that the document's KV memory holds: it is that of all ranks, `rank_block_bytes` are
    one rank's part of a block, and `rank_window_bytes` the part of layers with a window."""
    ranks = config.tensor_parallel
    shape = KVShape(
        block_size=config.caches.block_size,
        block_bytes=rank_block_bytes * ranks,
        window_block_bytes=rank_window_bytes * ranks,
        window=window,
        step_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    return shape.divide(config.caches.kv_bytes)


def num_snapshots(config: EngineConfig, state_bytes: int) -> int:
    """Snapshots of recurrent state that the document's memory holds; 0: the model has none."""
    if not state_bytes or not config.caches.prefix_caching:
        return 0
    return config.caches.snapshot_bytes // state_bytes


def load_engine(config: EngineConfig, phases: StartPhases | None = None) -> LoadedEngine:
    """Loads and warms the model and gives it the KV pool of the document. Raises StartupError."""
    with without_collections():
        if config.tensor_parallel == 1:  # ranks compute with what is put off
            defer()
        import foveal_runtime.model.runner.runner  # noqa: F401  counted as imports

    phases = phases or StartPhases()
    phases.done("imports")
    with told_loading(config.model.path):
        runner = _load_runner(config)
    namespace = model_namespace(config.model.path, config.model.revision)
    limit = runner.traits.max_position
    if config.model.max_model_len > limit:
        raise StartupError(
            f"model.max_model_len {config.model.max_model_len} is more than the model's own limit "
            f"of {limit}; lower it"
        )
    max_model_len = config.model.max_model_len or limit
    if not runner.traits.generates:  # an encoder computes a text in one step
        max_model_len = min(max_model_len, config.scheduler.max_num_batched_tokens)
    # Before KV memory is there: the largest item may need more than a step ever will.
    items = _largest_items(config, max_model_len) if runner.traits.is_multimodal else {}
    release_free_memory()
    keep_free_blocks()
    _allocate(runner, config, max_model_len)
    phases.done("load")
    log.info(f"weights and KV memory are there after {phases.seconds['load']:.1f} s; warming up")
    warm_up(runner, config.caches.block_size, has_windows=runner.num_window_blocks > 0)
    phases.done("warm")
    limits = {name: getattr(config.modalities, name).max_per_prompt for name in items}
    log.info(
        "model loaded",
        extra={
            "load_seconds": round(phases.seconds["load"], 2),
            "warm_seconds": round(phases.seconds["warm"], 2),
            "kv_blocks": runner.num_blocks - 1,
            "kv_window_blocks": max(runner.num_window_blocks - 1, 0),
            "largest_items": {name: item.num_tokens for name, item in items.items()},
        },
    )
    return LoadedEngine(
        runner=runner,
        num_blocks=runner.num_blocks,
        max_model_len=max_model_len,
        largest={n: LargestItem(item.num_tokens, item.num_embeds) for n, item in items.items()},
        # A prompt takes as many items as the limit says, but no more than the context holds.
        largest_request_bytes=sum(
            item.processed_bytes * min(limits[name], max(1, max_model_len // item.num_tokens))
            for name, item in items.items()
        ),
        namespace=namespace,
        revision=config.model.revision,
        kv_block_bytes=runner.kv_block_bytes,
        num_snapshots=num_snapshots(config, runner.traits.state_bytes),
        num_window_blocks=runner.num_window_blocks,
        window=runner.window,
    )


def _load_runner(config: EngineConfig) -> TorchRunner | TensorParallelRunner:
    """The model on its devices, with its adapters. Raises StartupError."""
    from foveal_runtime.model.parallel.tensor_parallel import TensorParallelRunner
    from foveal_runtime.model.runner.runner import TorchRunner

    runner: TorchRunner | TensorParallelRunner
    check_lora_names([one.name for one in config.loras])
    if config.tensor_parallel > 1:
        if config.loras or config.caches.lora_bytes:
            raise StartupError(
                f"tensor_parallel {config.tensor_parallel}: LoRA adapters run on one device; set "
                "it to 1, or leave out the adapters",
                param="tensor_parallel",
            )
        if config.model.quantization != "auto":
            raise StartupError(
                f"tensor_parallel {config.tensor_parallel}: weights that are quantised at load "
                "run on one device; set it to 1, or leave out quantization",
                param="tensor_parallel",
            )
        runner = TensorParallelRunner.load(
            config.model.path,
            config.tensor_parallel,
            dtype=config.model.dtype,
            device=config.device,
            block_size=config.caches.block_size,
            kv_dtype=config.caches.kv_dtype,
            max_model_len=config.model.max_model_len,
            attention=config.attention,
        )
    else:
        runner = TorchRunner.load(
            config.model.path,
            dtype=config.model.dtype,
            device=config.device,
            quantization=config.model.quantization,
            max_model_len=config.model.max_model_len,
            block_size=config.caches.block_size,
            kv_dtype=config.caches.kv_dtype,
            lora_bytes=config.caches.lora_bytes,
            attention=config.attention,
        )
    for source in config.loras:
        runner.loras.load(source)
    return runner


def _allocate(
    runner: TorchRunner | TensorParallelRunner, config: EngineConfig, max_model_len: int
) -> None:
    """KV memory, recurrent state, and what decode steps are recorded as on a GPU."""
    from foveal_runtime.model.runner.runner import TorchRunner

    blocks = kv_blocks(
        config, max_model_len, runner.kv_block_bytes, runner.window_block_bytes, runner.window
    )
    is_touched = config.caches.kv_touched
    if not isinstance(runner, TorchRunner):
        runner.allocate_kv(blocks.whole, num_window_blocks=blocks.window, is_touched=is_touched)
        return
    runner.allocate_kv(
        blocks.whole,
        num_window_blocks=blocks.window,
        num_sequences=config.scheduler.max_num_seqs,
        num_snapshots=num_snapshots(config, runner.traits.state_bytes),
        is_touched=is_touched,
    )
    if config.cuda_graphs and config.device.startswith("cuda"):
        _record_decoding(runner, config)


def _record_decoding(runner: TorchRunner, config: EngineConfig) -> None:
    from foveal_runtime.model.runner.graphs import CudaCapturer

    longest = config.model.max_model_len or runner.traits.max_position
    longest = min(longest, (runner.num_blocks - 1) * config.caches.block_size)
    began = time.perf_counter()
    if runner.record_decoding(
        CudaCapturer(), max_num_seqs=config.scheduler.max_num_seqs, max_model_len=longest
    ):
        seconds = round(time.perf_counter() - began, 2)
        log.info("decode steps recorded", extra={"record_seconds": seconds})


def _largest_items(config: EngineConfig, max_tokens: int) -> Mapping[str, ItemSize | ItemProfile]:
    """What the encoder budgets rest on: of the document, or asked of the real processor under the
    real limits, which takes seconds."""
    if config.items:
        return config.items
    from foveal_runtime.frontend.media.largest import largest_items

    found = largest_items(config.model.path, config.modalities, max_tokens, with_smaller=False)
    return {name: one.profile for name, one in found.items()}


def warm_up(runner: ModelRunner, block_size: int, *, has_windows: bool = False) -> None:
    """Runs two steps of one text request. Raises StartupError when the model cannot do them.

    A prefill and a decode step (an encoder has none) on the first KV block, then everything about
    them is forgotten: the first user's request is not the slow one."""
    name = "warm-up"
    num_tokens = max(1, block_size - 1)
    sampling = SamplingParams(max_tokens=2, pooling="" if runner.traits.generates else "mean")
    request = NewRequest(name, [0] * num_tokens, num_tokens, (), (), sampling)
    blocks = [TRASH_BLOCK + 1] * 2  # one block is enough; a second entry serves block size 1
    seen = blocks if has_windows else []
    prefill = ScheduledRequest(name, 0, num_tokens, blocks, True, window_ids=seen)
    result = runner.execute(StepPlan(0, [request], [prefill]))
    if name not in result.failed and runner.traits.generates:
        decode = ScheduledRequest(name, num_tokens, 1, blocks, True, window_ids=seen)
        result = runner.execute(StepPlan(0, [], [decode]))
    runner.execute(StepPlan(0, finished=[name]))
    if name in result.failed:
        raise StartupError(f"the model failed its first step: {result.failed[name]}")
