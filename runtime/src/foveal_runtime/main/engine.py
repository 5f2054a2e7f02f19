"""One engine process: model, caches, scheduler and socket, put together and taken down.

Started by `foveal-runtime engine --config`. Sets thread counts before torch is imported, loads and
warms the model while /livez already answers, serves until SIGTERM (drain) or SIGINT (stop).
"""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path

from foveal_runtime.engine.assemble import LoadedEngine, assemble_core, scheduler_limits
from foveal_runtime.engine.core import EngineCore
from foveal_runtime.engine.event_stream import EventStream
from foveal_runtime.engine.events import EventLog
from foveal_runtime.engine.metrics import EngineMetrics
from foveal_runtime.engine.server import EngineServer
from foveal_runtime.main.warmup import warm_up
from foveal_runtime.model import threads
from foveal_runtime.plan.config import EngineConfig, load
from foveal_runtime.plan.encoder_budget import LargestItem
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.telemetry.logs import configure_logging
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.wire.namespace import model_namespace
from foveal_runtime.wire.shm import SharedReader
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
    name = config.engine_id
    metrics = Metrics("engine", model_name=config.model.served_name, process=name, engine=name)
    server = EngineServer(
        http_host=config.http_host,
        http_port=config.http_port,
        drain_timeout_seconds=config.drain_timeout_seconds,
        render_metrics=metrics.exposition,
    )
    shared = SharedReader(Path(config.shm_directory)) if config.shm_directory else None
    stream = EventStream(config.events_bind, keys=config.curve) if config.events_bind else None
    signal.signal(signal.SIGTERM, lambda *_: server.request_drain())
    signal.signal(signal.SIGINT, lambda *_: server.request_stop())
    if stream is not None:
        stream.start()
    try:
        return server.run(
            lambda: make_core(config, namespace, server, metrics, stream),
            lambda: ZmqRouter(config.bind, keys=config.curve),
            open_shared=None if shared is None else shared.open,
            on_ready=lambda endpoint: log.info("ready", extra={"endpoint": endpoint}),
        )
    finally:
        if stream is not None:
            stream.close()


def make_core(
    config: EngineConfig,
    namespace: bytes,
    server: EngineServer,
    metrics: Metrics,
    stream: EventStream | None,
) -> EngineCore:
    """Loads and warms the model, sizes everything from the document, joins the parts."""
    loaded = load_model(config, namespace)
    warm_up(loaded.runner, scheduler_limits(config, loaded))
    events = None if stream is None else EventLog(config.engine_id, stream.publish)
    core = assemble_core(config, loaded, send=server.send, events=events)
    metrics.add_source(EngineMetrics(core, stream=stream).collect)
    return core


def load_model(config: EngineConfig, namespace: bytes) -> LoadedEngine:
    """The runner with its KV pool, and what its limits follow from. Raises StartupError."""
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
    max_position = runner.traits.max_position
    max_model_len = config.model.max_model_len or max_position
    if max_model_len > max_position:
        raise StartupError(
            f"model.max_model_len {max_model_len} is more than the model's own limit of "
            f"{max_position}; lower it"
        )
    largest = _largest_items(config, max_model_len) if runner.traits.is_multimodal else {}
    seconds = round(time.perf_counter() - started, 1)
    log.info("model loaded", extra={"seconds": seconds, "kv_blocks": num_blocks})
    return LoadedEngine(
        runner=runner,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        largest=largest,
        namespace=namespace,
    )


def _largest_items(config: EngineConfig, max_model_len: int) -> dict[str, LargestItem]:
    """What the processor makes of the largest media that the limits let through."""
    from foveal_runtime.frontend.media.largest import largest_items

    found = largest_items(config.model.path, config.modalities, max_model_len)
    return {
        name: LargestItem(one.profile.num_tokens, one.profile.num_embeds)
        for name, one in found.items()
    }
