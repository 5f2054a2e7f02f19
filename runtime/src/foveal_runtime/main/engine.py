"""One engine process: model, caches, scheduler and socket, put together and taken down.

Started by `foveal-runtime engine --config`. Sets thread counts before torch is imported, loads and
warms the model while /livez already answers, serves until SIGTERM (drain) or SIGINT (stop).
"""

from __future__ import annotations

import logging
import signal
import time

import msgspec

from foveal_runtime.engine.core import EngineCore
from foveal_runtime.engine.events import EventLog
from foveal_runtime.engine.limits import SchedulerLimits
from foveal_runtime.engine.scheduler import Scheduler
from foveal_runtime.engine.server import EngineServer
from foveal_runtime.engine.step import ModelRunner
from foveal_runtime.main.warmup import warm_up
from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.model import threads
from foveal_runtime.plan.config import EngineConfig, load
from foveal_runtime.plan.encoder_budget import LargestItem, compute_encoder_budget
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.wire.messages import EngineInfo
from foveal_runtime.wire.namespace import model_namespace
from foveal_runtime.wire.zmq_transport import ZmqRouter

log = logging.getLogger(__name__)


def run(path: str) -> int:
    config = load(path, EngineConfig)
    assert isinstance(config, EngineConfig)
    configure_logging(config.log_format, process=config.engine_id)
    threads.configure(config.num_threads)
    return serve(config)


def serve(config: EngineConfig) -> int:
    """Runs the process to its end; returns its exit code. Raises StartupError."""
    namespace = model_namespace(config.model.path, config.model.revision)
    server = EngineServer(
        http_host=config.http_host,
        http_port=config.http_port,
        drain_timeout_seconds=config.drain_timeout_seconds,
    )
    signal.signal(signal.SIGTERM, lambda *_: server.request_drain())
    signal.signal(signal.SIGINT, lambda *_: server.request_stop())
    return server.run(
        lambda: make_core(config, namespace, server),
        lambda: ZmqRouter(config.bind, keys=config.curve),
        on_ready=lambda endpoint: log.info("ready", extra={"endpoint": endpoint}),
    )


def make_core(config: EngineConfig, namespace: bytes, server: EngineServer) -> EngineCore:
    """Loads and warms the model, sizes everything from the document, joins the parts."""
    runner, limits = load_model(config, namespace)
    warm_up(runner, limits)
    info = EngineInfo(
        engine_id=config.engine_id,
        model=config.model.served_name,
        revision=config.model.revision,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        largest_item_embeds=limits.encoder_cache_embeds,
    )
    receiver = Receiver(
        ReceiverLimits(
            capacity_bytes=config.caches.ipc_bytes,
            staging_bytes=config.caches.ipc_staging_bytes,
        ),
        namespace=namespace,
        boot=time.time_ns(),
        node=config.node,
        info=msgspec.Raw(msgspec.msgpack.encode(info)),
    )
    events = EventLog() if config.events_bind else None
    scheduler = Scheduler(limits, runner.traits, clock=time.monotonic, observer=events)
    return EngineCore(
        scheduler, runner, receiver, send=server.send, clock=time.monotonic, events=events
    )


def load_model(config: EngineConfig, namespace: bytes) -> tuple[ModelRunner, SchedulerLimits]:
    """The runner with its KV pool, and the limits that follow from document and model."""
    from foveal_runtime.model.runner import TorchRunner

    started = time.perf_counter()
    log.info("loading the model", extra={"path": config.model.path})
    runner = TorchRunner.load(
        config.model.path,
        dtype=config.model.dtype,
        device=config.device,
        block_size=config.caches.block_size,
        attention=config.attention,
    )
    num_blocks = config.caches.kv_bytes // runner.kv_block_bytes
    runner.allocate_kv(num_blocks)
    traits, scheduler = runner.traits, config.scheduler
    max_model_len = config.model.max_model_len or traits.max_position
    if max_model_len > traits.max_position:
        raise StartupError(
            f"model.max_model_len {max_model_len} is more than the model's own limit of "
            f"{traits.max_position}; lower it"
        )
    try:
        budget = compute_encoder_budget(
            is_multimodal=traits.is_multimodal,
            largest=_largest_items(config),
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_encoder_input_tokens=scheduler.max_num_encoder_input_tokens
            or scheduler.max_num_batched_tokens,
            encoder_cache_size=config.caches.encoder_embeds or scheduler.max_num_batched_tokens,
            disable_chunked_mm_input=scheduler.disable_chunked_mm_input,
        )
    except ValueError as error:
        raise StartupError(str(error)) from error
    log.info(
        "model loaded",
        extra={
            "seconds": round(time.perf_counter() - started, 1),
            "kv_blocks": num_blocks,
            "encoder_cache_embeds": budget.cache_embeds,
        },
    )
    return runner, SchedulerLimits(
        num_blocks=num_blocks,
        block_size=config.caches.block_size,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=min(max_model_len, (num_blocks - 1) * config.caches.block_size),
        max_waiting=scheduler.max_waiting,
        policy=scheduler.policy,
        disable_chunked_mm_input=scheduler.disable_chunked_mm_input,
        encoder_compute_embeds=budget.compute_embeds,
        encoder_cache_embeds=budget.cache_embeds,
        encoder_host_bytes=config.caches.encoder_host_bytes,
        prefix_caching=config.caches.prefix_caching,
        namespace=namespace,
    )


def _largest_items(config: EngineConfig) -> dict[str, LargestItem]:
    raise NotImplementedError
