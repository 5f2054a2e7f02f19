"""The start-up documents: every number a process obeys, from the resource and the plan, and their
ConfigMaps.

The engine's document depends on nothing of
frontend.*, so that no change of the API tier can restart an engine; a test holds it to that.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Literal

import msgspec

from foveal_operator.api.caches import WarmSet
from foveal_operator.api.operations import CacheEvents, SecretKey
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import modalities_config, shared_value_bytes
from foveal_operator.manifests.context import (
    ENGINE_EVENTS_PORT,
    ENGINE_HTTP_PORT,
    ENGINE_PORT,
    Context,
    content_hash,
)
from foveal_operator.manifests.model_source import model_source
from foveal_runtime.plan.config import (
    DEFAULT_DOCUMENT_PAGES,
    Admission,
    CurveKeys,
    EngineAddress,
    EngineCaches,
    EngineConfig,
    FrontendConfig,
    InjectionConfig,
    MediaSources,
    ModalitiesConfig,
    ModelConfig,
    Pooling,
    RequestDefaults,
    SchedulerConfig,
    Task,
)
from foveal_runtime.plan.lora import LoraSource
from foveal_runtime.plan.quantity import parse_bytes, parse_millicores

CURVE_DIRECTORY = "/etc/foveal/curve"
SECRETS_DIRECTORY = "/etc/foveal/secrets"
SHARED_DIRECTORY = "/shared"
WARM_DIRECTORY = "/warm"
FILES_DIRECTORY = "/files"
ADDED: dict[tuple[str, str], object] = {
    ("model", "quantization"): "auto",
    ("caches", "kv_dtype"): "auto",
    ("caches", "kv_touched"): True,
    ("scheduler", "max_num_mixed_tokens"): 0,
    ("scheduler", "target_itl_ms"): 0,
    ("scheduler", "num_speculative_tokens"): 0,
    ("", "allowed_origins"): [],
    ("", "events_format"): "foveal",
    ("", "events_topic"): "",
    ("", "events_plain"): False,
    ("", "ignore_unknown_options"): False,
    ("", "media_embeds"): False,
    ("admission", "max_answer_scores"): 1 << 21,
    ("", "task"): "generate",
    ("", "pooling"): "",
    ("", "tool_format"): "",
    ("", "chat_template"): "",
    ("", "request_defaults"): msgspec.to_builtins(RequestDefaults()),
    ("", "page"): True,
    ("", "items"): {},
    ("admission", "client_share"): 0.5,
    ("admission", "upload_window_seconds"): 10.0,
    ("admission", "min_upload_bytes_per_second"): 8192,
    ("admission", "write_timeout_seconds"): 60.0,
    ("caches", "snapshot_bytes"): 0,
    ("caches", "lora_bytes"): 0,
    ("", "loras"): [],
    ("modalities.image", "max_pages"): DEFAULT_DOCUMENT_PAGES,
    ("modalities.video", "max_pages"): DEFAULT_DOCUMENT_PAGES,
    ("modalities.audio", "max_pages"): DEFAULT_DOCUMENT_PAGES,
}
"""(part, field) of documents that came after the first ones, with the value that older runtimes
obey without knowing it; the part of the document's own fields is "", and a part's part is "a.b"."""
_SWITCHES: dict[str, Literal["auto", "on", "off"]] = {
    "Auto": "auto", "Enabled": "on", "Disabled": "off",
}  # fmt: skip

_TASKS: dict[str, Task] = {"Generate": "generate", "Embed": "embed", "Both": "both"}
_POOLINGS: dict[str | None, Pooling | Literal[""]] = {
    None: "", "Mean": "mean", "Last": "last", "Cls": "cls",
}  # fmt: skip


def secret_path(purpose: str, ref: SecretKey | None) -> str:
    """Where a key of a Secret is mounted; "" when there is none."""
    return f"{SECRETS_DIRECTORY}/{purpose}/{ref.key}" if ref else ""


def engine_cpu_millicores(context: Context) -> int:
    engine = context.inference.spec.engine
    if engine.cpu is not None:
        return parse_millicores(engine.cpu)
    return 4000 * engine.num_devices


def frontend_cpu_millicores(context: Context) -> int:
    frontend = context.inference.spec.frontend
    if frontend.cpu is not None:
        return parse_millicores(frontend.cpu)
    return 1000 * (frontend.processes + frontend.media_workers)


def engine_document(context: Context) -> EngineConfig:
    """The document of every engine of the resource; pods fill in their own names."""
    spec, plan = context.inference.spec, context.budgets
    engine, is_cpu = spec.engine, spec.engine.accelerator.type == "CPU"
    shared = spec.caches.ipc.type == "SharedMemory"
    return EngineConfig(
        engine_id="$(POD_NAME)",
        # Of its series only: what clients put into `model` concerns frontends alone.
        model=_model(context, context.name, quantization=engine.quantization),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_mixed_tokens=engine.max_num_mixed_tokens or 0,
            target_itl_ms=engine.target_itl_milliseconds or 0,
            num_speculative_tokens=engine.num_speculative_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_num_encoder_input_tokens=plan.encoder_compute_embeds,
            disable_chunked_mm_input=engine.disable_chunked_multi_modal_input,
            policy="priority" if engine.scheduling_policy == "Priority" else "fcfs",
            max_waiting=engine.max_waiting,
        ),
        caches=EngineCaches(
            ipc_bytes=plan.ipc_bytes,
            ipc_staging_bytes=plan.ipc_staging_bytes,
            encoder_embeds=plan.encoder_embeds,
            encoder_host_bytes=plan.encoder_host_bytes,
            kv_bytes=plan.kv_bytes,
            snapshot_bytes=plan.snapshot_bytes,
            lora_bytes=parse_bytes(engine.lora.memory) if engine.lora else 0,
            block_size=engine.block_size,
            kv_dtype=spec.caches.kv.dtype,
            prefix_caching=engine.prefix_caching,
            encoder_eviction="cost" if spec.caches.encoder.eviction == "Cost" else "lru",
            **_warm(spec.caches.encoder.warm_set),
        ),
        modalities=_without_documents(modalities_config(spec.modalities)),
        bind=f"tcp://$(POD_HOST):{ENGINE_PORT}",
        http_host="$(POD_IP)",
        http_port=ENGINE_HTTP_PORT,
        **_events(spec.networking.cache_events),
        curve=CurveKeys(
            server_public_file=f"{CURVE_DIRECTORY}/server-public",
            server_secret_file=f"{CURVE_DIRECTORY}/server-secret",
            client_public_file=f"{CURVE_DIRECTORY}/client-public",
        ),
        node="$(NODE_NAME)",
        shm_directory=SHARED_DIRECTORY if shared else "",
        device="cpu" if is_cpu else "cuda",
        attention=engine.attention,
        run_ahead=_SWITCHES[engine.run_ahead],
        cuda_graphs=engine.cuda_graphs,
        num_threads=-(-engine_cpu_millicores(context) // 1000) if is_cpu else 0,
        tensor_parallel=engine.num_devices,
        loras=_loras(context),
        drain_timeout_seconds=float(spec.rollout.drain_timeout_seconds),
        log_format="json",
    )


def frontend_document(context: Context) -> FrontendConfig:
    """The document of every frontend. It names the engines' Service, never single engines."""
    spec, plan = context.inference.spec, context.budgets
    frontend, security = spec.frontend, spec.security
    shared = spec.caches.ipc.type == "SharedMemory"
    host = (
        f"{context.child('engine')}.{context.inference.namespace}.svc."
        f"{context.facts.cluster_domain}"
    )
    return FrontendConfig(
        frontend_id="$(POD_NAME)",
        model=_model(context, context.inference.served_name),
        modalities=modalities_config(spec.modalities),
        host="$(POD_IP)",
        loopback=True,
        port=spec.networking.port,
        processes=frontend.processes,
        engines=(
            EngineAddress(
                endpoint=f"tcp://{host}:{ENGINE_PORT}",
                http=f"http://{host}:{ENGINE_HTTP_PORT}",
                dns=True,
            ),
        ),
        curve=CurveKeys(
            server_public_file=f"{CURVE_DIRECTORY}/server-public",
            client_public_file=f"{CURVE_DIRECTORY}/client-public",
            client_secret_file=f"{CURVE_DIRECTORY}/client-secret",
        ),
        node="$(NODE_NAME)",
        processor_bytes=plan.processor_bytes,
        ipc_type="shm" if shared else "inline",
        shm_directory=SHARED_DIRECTORY if shared else "",
        shm_bytes=shared_value_bytes(spec.caches.ipc),
        shm_min_value_bytes=parse_bytes(spec.caches.ipc.min_shared_value),
        media_workers=frontend.media_workers,
        media_sources=MediaSources(
            allowed_domains=security.media_sources.allowed_domains,
            file_root=FILES_DIRECTORY if security.media_sources.local_files else "",
            fetch_timeout_seconds=float(security.media_sources.fetch_timeout_seconds),
        ),
        admission=Admission(
            max_requests=frontend.admission.max_requests,
            max_tokens=frontend.admission.max_tokens,
            max_media_bytes=parse_bytes(frontend.admission.max_media),
            max_body_bytes=parse_bytes(frontend.admission.max_body),
        ),
        injection=_injection(context),
        api_key_file=secret_path("api", security.api_key_secret_ref),
        admin_key_file=secret_path("admin", security.admin_key_secret_ref),
        tenant_salt_header=security.tenant_salt_header or "",
        allowed_origins=security.allowed_origins,
        ignore_unknown_options=frontend.unknown_options == "Ignore",
        media_embeds=frontend.media_embeds,
        task=_TASKS[spec.model.task],
        pooling=_POOLINGS[spec.model.pooling],
        chat_template=frontend.chat_template or "",
        tool_format=frontend.tool_format or "",
        request_defaults=frontend.request_defaults or RequestDefaults(),
        page=frontend.page,
        drain_timeout_seconds=float(spec.rollout.drain_timeout_seconds),
        log_format="json",
    )


def config_map(context: Context, role: Literal["engine", "frontend"]) -> Obj:
    """The role's document, immutable, in an object that is named by the hash of what it holds."""
    document = engine_document(context) if role == "engine" else frontend_document(context)
    data = {f"{role}.json": document_json(document)}
    suffix = f"{role}-{content_hash(data)}"
    return context.object("v1", "ConfigMap", suffix, role, immutable=True, data=data)


def document_json(config: EngineConfig | FrontendConfig) -> str:
    """Readable and the same on every machine.

    A field of ADDED is left out while it says what runtimes do that do not know it: a new operator
    then neither changes the document of pods that run nor gives it to an older image that would
    refuse it.
    """
    fields = msgspec.json.decode(msgspec.json.encode(config, order="deterministic"))
    for (part, name), default in ADDED.items():
        holder = fields
        for step in part.split(".") if part else ():
            holder = holder.get(step, {})
        if name in holder and holder[name] == default:
            del holder[name]
    data = msgspec.json.encode(fields)  # in the order of the fields
    return msgspec.json.format(data, indent=2).decode() + "\n"


def _without_documents(modalities: ModalitiesConfig) -> ModalitiesConfig:
    """What engines need to know: documents concern frontends alone, so engines need no restart."""
    image = msgspec.structs.replace(modalities.image, max_pages=DEFAULT_DOCUMENT_PAGES)
    return msgspec.structs.replace(modalities, image=image)


def _warm(warm_set: WarmSet | None) -> dict[str, Any]:
    """Each engine has a folder of its own on the claim, which all of them mount."""
    if warm_set is None:
        return {}
    directory = f"{WARM_DIRECTORY}/$(POD_NAME)"
    return {"warm_directory": directory, "warm_bytes": parse_bytes(warm_set.size)}


def _loras(context: Context) -> tuple[LoraSource, ...]:
    """A path that is not absolute is below the model's."""
    lora, model = context.inference.spec.engine.lora, PurePosixPath(model_source(context).path)
    return tuple(
        LoraSource(one.name, str(model / one.path)) for one in (lora.adapters if lora else ())
    )


def _events(wanted: CacheEvents | None) -> dict[str, Any]:
    if wanted is None:
        return {}
    is_vllm = wanted.format == "VLLM"
    return {
        "events_bind": f"tcp://$(POD_HOST):{ENGINE_EVENTS_PORT}",
        "events_format": "vllm" if is_vllm else "foveal",
        "events_topic": wanted.topic or "",
        "events_plain": is_vllm,
    }


def _model(context: Context, name: str, **of_engines: Any) -> ModelConfig:
    engine = context.inference.spec.engine
    return ModelConfig(
        path=model_source(context).path,
        name=name,
        dtype=engine.dtype,
        max_model_len=context.budgets.max_model_len,
        **of_engines,
    )


def _injection(context: Context) -> InjectionConfig:
    injection = context.inference.spec.security.injection
    if injection is None:
        return InjectionConfig()
    return InjectionConfig(
        enabled=True,
        api_key_file=secret_path("injection", injection.key_secret_ref),
        trusted=injection.trusted,
    )
