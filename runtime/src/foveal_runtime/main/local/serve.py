"""`foveal-runtime serve MODEL`: a local deployment that runs until Ctrl-C.

Builds the documents from the options and runs them as `launch` does.
"""

from __future__ import annotations

import argparse
import tempfile

from foveal_runtime.main.documents import LocalOptions, local_documents
from foveal_runtime.main.local.launch import launch
from foveal_runtime.plan.local import LocalDeploymentConfig, free_port


def options_from(arguments: argparse.Namespace) -> LocalOptions:
    return LocalOptions(
        model=arguments.model,
        name=arguments.name,
        host=arguments.host,
        port=arguments.port,
        num_frontends=arguments.frontends,
        num_engines=arguments.engines,
        processes=arguments.processes,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_mixed_tokens=arguments.max_num_mixed_tokens,
        max_num_seqs=arguments.max_num_seqs,
        block_size=arguments.block_size,
        kv_bytes=arguments.kv_cache,
        kv_dtype=arguments.kv_dtype,
        ipc_bytes=arguments.ipc_cache,
        ipc_type=arguments.ipc_type,
        shm_bytes=arguments.shm_size,
        processor_bytes=arguments.processor_cache,
        encoder_embeds=arguments.encoder_cache_embeds,
        encoder_host_bytes=arguments.encoder_host_tier,
        encoder_eviction=arguments.encoder_eviction,
        warm_directory=arguments.warm_directory,
        prefix_caching=not arguments.no_prefix_caching,
        device=arguments.device,
        attention=arguments.attention,
        run_ahead=arguments.run_ahead,
        cuda_graphs=not arguments.no_cuda_graphs,
        num_threads=arguments.threads,
        media_workers=arguments.media_workers,
        tensor_parallel=arguments.tensor_parallel,
        allowed_domains=tuple(arguments.allowed_domain),
        file_root=arguments.file_root,
        allowed_origins=tuple(arguments.allowed_origin),
        ignore_unknown_options=arguments.ignore_unknown_options,
        api_key_file=arguments.api_key_file,
        admin_key_file=arguments.admin_key_file,
        injection_key_file=arguments.injection_key_file,
        injection_trusted=arguments.trust_injected_keys,
        log_format=arguments.log_format,
        idle_check_seconds=arguments.idle_check_seconds,
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Raises StartupError."""
    options = options_from(arguments)
    engines, frontends = local_documents(options, free_port)
    return launch(
        LocalDeploymentConfig(
            name=frontends[0].model.served_name,
            engines=tuple(engines),
            frontends=tuple(frontends),
            folder=tempfile.mkdtemp(prefix="foveal-"),
            keep_folder=False,
            view="line",
        )
    )
