"""From command-line options to the documents that processes start from (local mode).

Pure: options in, EngineConfig and FrontendConfig out. The operator writes the same documents from
a resource; nothing here starts anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from foveal_runtime.plan.config import (
    GIB,
    EngineAddress,
    EngineCaches,
    EngineConfig,
    FrontendConfig,
    MediaSources,
    ModelConfig,
    SchedulerConfig,
)


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `foveal-runtime serve` takes; sizes in bytes."""

    model: str
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    num_frontends: int = 1
    num_engines: int = 1
    processes: int = 1
    dtype: str = "auto"
    max_model_len: int = 0
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    block_size: int = 16
    kv_bytes: int = 1 * GIB
    ipc_bytes: int = 4 * GIB
    ipc_type: str = "inline"
    processor_bytes: int = 4 * GIB
    encoder_embeds: int = 0
    encoder_host_bytes: int = 0
    encoder_eviction: str = "lru"
    warm_directory: str = ""
    prefix_caching: bool = True
    device: str = "cpu"
    attention: str = "auto"
    num_threads: int = 0
    media_workers: int = 0
    tensor_parallel: int = 1
    allowed_domains: tuple[str, ...] = ()
    file_root: str = ""
    api_key_file: str = ""
    admin_key_file: str = ""
    log_format: str = "auto"


def _warm_directory(parent: str, engine: int) -> str:
    """Each engine has a directory of its own."""
    return str(Path(parent).resolve() / f"engine-{engine}") if parent else ""


def local_documents(
    options: LocalOptions, pick_port: Callable[[], int]
) -> tuple[list[EngineConfig], list[FrontendConfig]]:
    """Documents for `num_engines` engines and `num_frontends` frontends on loopback.

    The first frontend listens on `options.port`, the next ones on the ports after it (0: any free
    ports); its /metrics shows every other process too.
    """
    model = ModelConfig(
        path=str(Path(options.model).resolve()),
        name=options.name,
        dtype=options.dtype,  # type: ignore[arg-type]
        max_model_len=options.max_model_len,
    )
    shm = "/dev/shm" if options.ipc_type == "shm" else ""
    engines = [
        EngineConfig(
            engine_id=f"engine-{i}",
            model=model,
            scheduler=SchedulerConfig(
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_num_seqs=options.max_num_seqs,
            ),
            caches=EngineCaches(
                ipc_bytes=options.ipc_bytes,
                encoder_embeds=options.encoder_embeds,
                encoder_host_bytes=options.encoder_host_bytes,
                encoder_eviction=options.encoder_eviction,  # type: ignore[arg-type]
                warm_directory=_warm_directory(options.warm_directory, i),
                kv_bytes=options.kv_bytes,
                block_size=options.block_size,
                prefix_caching=options.prefix_caching,
            ),
            bind=f"tcp://127.0.0.1:{pick_port()}",
            http_port=pick_port(),
            node="local",
            shm_directory=shm,
            device=options.device,
            attention=options.attention,
            num_threads=options.num_threads,
            tensor_parallel=options.tensor_parallel,
            log_format=options.log_format,  # type: ignore[arg-type]
        )
        for i in range(options.num_engines)
    ]
    addresses = tuple(
        EngineAddress(endpoint=e.bind, http=f"http://{e.http_host}:{e.http_port}") for e in engines
    )
    ports = [
        options.port + i if options.port else pick_port() for i in range(options.num_frontends)
    ]
    urls = [f"http://{options.host}:{port}" for port in ports]
    frontends = [
        FrontendConfig(
            frontend_id=f"frontend-{i}",
            model=model,
            host=options.host,
            port=ports[i],
            processes=options.processes,
            engines=addresses,
            node="local",
            processor_bytes=options.processor_bytes,
            ipc_type=options.ipc_type,  # type: ignore[arg-type]
            shm_directory=shm,
            shm_bytes=options.processor_bytes if shm else 0,
            media_workers=options.media_workers,
            media_sources=MediaSources(
                allowed_domains=options.allowed_domains, file_root=options.file_root
            ),
            api_key_file=options.api_key_file,
            admin_key_file=options.admin_key_file,
            metrics_peers=tuple(
                [a.http + "/metrics" for a in addresses]
                + [u + "/metrics?own=1" for j, u in enumerate(urls) if j != i]
            ),
            log_format=options.log_format,  # type: ignore[arg-type]
        )
        for i in range(options.num_frontends)
    ]
    return engines, frontends
