"""The configuration documents that start processes: parsed once, frozen, checked at the edge.

Written by the operator (a ConfigMap), by `foveal up` and by `foveal-runtime serve`; read by main/,
which hands each package its own part. All sizes are bytes; nobody writes to a config: a derived
value is a new object (`msgspec.structs.replace`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.lora import LoraSource

KVDtype = Literal["auto", "bfloat16", "fp8"]
ToolFormat = Literal[
    "hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_v11", "mistral_v3", "pythonic",
    "lfm2", "gemma", "deepseek", "deepseek_v3", "glm", "kimi", "smolvlm", "granite", "json",
]  # fmt: skip
Task = Literal["generate", "embed", "both"]
Pooling = Literal["mean", "last", "cls"]
GIB = 1024**3
MIB = 1024**2
DEFAULT_VIDEO_FRAMES = 32
DEFAULT_DOCUMENT_PAGES = 16
DEFAULT_VIDEO_PIXELS = 768 * 28 * 28
"""Of a frame. A 7B model of the Qwen2.5-VL kind then takes 12,288 tokens for its longest video,
whose encoding needs 1.8 GiB: a device of 24 GiB carries that beside the weights. Its processor
shrinks frames to the same size by default."""


Quantization = Literal["auto", "int8", "int4"]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which model, as served.

    Attributes:
        path: a local directory (weights are fetched by the operator's Job or by the user).
        name: what clients put into `model`; default: the directory's name.
        revision: identifies weights and processor in every cache key; "" = derived from content.
        dtype: "auto" takes the checkpoint's.
        quantization: what the decoder's linear layers are quantised to as they are loaded; "auto":
            they stay as the checkpoint has them.
        max_model_len: prompt + output tokens; 0 = the model's own limit.
    """

    path: str
    name: str = ""
    revision: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Quantization = "auto"
    max_model_len: int = 0

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name


class ModalityLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on one modality; 0 items switches it off. Enforced before anything is decoded.

    Attributes:
        max_pixels: an image, or a frame of a video, with more is refused.
        resize_pixels: one with more is shrunk to so many, in its own proportions; 0 = off.
        max_frames: so many of a video's frames are kept, evenly spread.
        max_pages: a document with more pages, each of which becomes an image, is refused.
    """

    max_per_prompt: int = 16
    max_bytes: int = 64 * MIB
    max_pixels: int = 64_000_000
    resize_pixels: int = 0
    max_seconds: float = 600.0
    max_frames: int = DEFAULT_VIDEO_FRAMES
    max_pages: int = DEFAULT_DOCUMENT_PAGES

    @property
    def processed_pixels(self) -> int:
        """Width x height that reaches the processor at most."""
        return min(self.max_pixels, self.resize_pixels or self.max_pixels)


class ModalitiesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    image: ModalityLimits = ModalityLimits()
    video: ModalityLimits = ModalityLimits(
        max_per_prompt=2, max_bytes=256 * MIB, resize_pixels=DEFAULT_VIDEO_PIXELS
    )
    audio: ModalityLimits = ModalityLimits(max_per_prompt=4, max_bytes=64 * MIB)


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one step may hold. `max_num_encoder_input_tokens` counts embeddings; 0 = derived.

    `max_num_mixed_tokens`: at most so many tokens, and so many embeddings or one item, in a step in
    which a running stream gets a token, so that a new prompt does not stall it; 0 = derived: on a
    CPU by what a step of streams alone takes.
    `target_itl_ms`: such a step holds what keeps it within so many milliseconds, by what steps took
    so far; 0 = no target.
    `num_speculative_tokens`: guessed from a stream's own text for one step to check; 0 = none.
    """

    max_num_batched_tokens: int = 2048
    max_num_mixed_tokens: int = 0
    target_itl_ms: int = 0
    num_speculative_tokens: int = 0
    max_num_seqs: int = 128
    max_num_encoder_input_tokens: int = 0
    disable_chunked_mm_input: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting: int = 1024


class EngineCaches(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Byte budgets of one engine.

    Attributes:
        ipc_bytes: C, the value pool; 0 = no cache, every item takes the bypass.
        ipc_staging_bytes: S, values in flight and past the cache.
        encoder_embeds: size of the encoder cache in embeddings; 0 = derived (largest item or
            max_num_batched_tokens, whichever is more).
        encoder_host_bytes: host tier behind it; 0 = off.
        kv_bytes: KV pool, of all ranks together; block_size in tokens.
        lora_bytes: LoRA adapters on the device, all together; 0: none can be loaded.
        snapshot_bytes: snapshots of recurrent state, for models with such layers; 0: their prefixes
            are not reused.
        kv_touched: all KV memory is taken at the start, so that a limit that is too low shows then;
            else, on a CPU, as it is of use (see `block_pool.BlockPool`).
        kv_dtype: what keys and values are kept as; "auto": as the model computes. "fp8" is e4m3,
            without scales.
        warm_directory: hot encoder outputs survive a planned restart here; "" = off. One engine's
            own: two engines must not share it.
        warm_bytes: what that may hold at most.
        encoder_eviction: which idle encoder output goes first: the one released first ("lru") or
            the one that is cheapest to encode again per embedding ("cost").
        unpin_at: how long a request pins its values: to its end ("finish"), or until its items are
            encoded ("encoded"): less memory is in use, and a request that is preempted then may
            have to fetch its values again.
    """

    ipc_bytes: int = 4 * GIB
    ipc_staging_bytes: int = 256 * MIB
    encoder_embeds: int = 0
    encoder_host_bytes: int = 0
    kv_bytes: int = 1 * GIB
    snapshot_bytes: int = 0
    lora_bytes: int = 0
    block_size: int = 16
    kv_dtype: KVDtype = "auto"
    kv_touched: bool = True
    prefix_caching: bool = True
    warm_directory: str = ""
    warm_bytes: int = 1 * GIB
    encoder_eviction: Literal["lru", "cost"] = "lru"
    unpin_at: Literal["finish", "encoded"] = "finish"


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files with Z85 keys for CURVE; all empty = plain transport (loopback only)."""

    server_public_file: str = ""
    server_secret_file: str = ""
    client_public_file: str = ""
    client_secret_file: str = ""


class ItemSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The largest item of a modality, as `ItemProfile` has it."""

    num_tokens: int
    num_embeds: int
    processed_bytes: int


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine process (one data-parallel rank).

    Attributes:
        bind: ZMQ endpoint for frontends, e.g. tcp://127.0.0.1:5570.
        http_host, http_port: /livez, /readyz, /metrics.
        events_bind: PUB endpoint of the cache event stream; "" = off.
        events_format: "foveal", or "vllm": the schema that routers for vLLM read.
        events_topic: topic of the stream; "" = the format's own ("vllm": none).
        events_plain: the stream may listen without CURVE on an address that is not loopback, as
            readers of vLLM's schema need; whoever reaches it reads token ids of prompts.
        device: "cpu" or "cuda". attention: backend name; "auto" chooses.
        run_ahead: decode steps are submitted before the step before them has ended; "auto": on a
            GPU. cuda_graphs: decode steps are recorded and played; of no effect on CPUs.
        num_threads: compute threads; 0 = from the CPU quota.
        tensor_parallel: ranks of this engine on this machine.
        loras: adapters that are loaded at the start; a request names one as its model.
        items: modality -> its largest item under `modalities` and `max_model_len`, where a profile
            knows it; empty: the engine asks the processor at each start.
        idle_check_seconds: for tests and debugging: an idle engine checks all its books at most
            this often, and ends when they do not agree; 0 = never.
    """

    engine_id: str = "engine-0"
    model: ModelConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    caches: EngineCaches = EngineCaches()
    modalities: ModalitiesConfig = ModalitiesConfig()
    bind: str = "tcp://127.0.0.1:5570"
    http_host: str = "127.0.0.1"
    http_port: int = 5580
    events_bind: str = ""
    events_format: Literal["foveal", "vllm"] = "foveal"
    events_topic: str = ""
    events_plain: bool = False
    curve: CurveKeys = CurveKeys()
    node: str = ""
    shm_directory: str = ""
    device: str = "cpu"
    attention: str = "auto"
    run_ahead: Literal["auto", "on", "off"] = "auto"
    cuda_graphs: bool = True
    num_threads: int = 0
    tensor_parallel: int = 1
    loras: tuple[LoraSource, ...] = ()
    drain_timeout_seconds: float = 120.0
    log_format: Literal["auto", "text", "json"] = "auto"
    items: dict[str, ItemSize] = {}
    idle_check_seconds: float = 0.0

    @property
    def runs_ahead(self) -> bool:
        if self.run_ahead == "auto":
            return self.device.startswith("cuda")
        return self.run_ahead == "on"


class Admission(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a frontend process says 429/503, decided before decoding anything.

    Attributes:
        max_answer_scores: log probabilities of prompts and answers that a process holds at a time.
        client_share: part of the connections, uploads and upload bytes that one client address may
            hold at a time.
        upload_window_seconds, min_upload_bytes_per_second: a body that brings less than this in
            any window ends with 408.
        write_timeout_seconds: a client that reads nothing of its answer for so long is cut off.
    """

    max_requests: int = 512
    max_tokens: int = 2_000_000
    max_media_bytes: int = 512 * MIB
    max_body_bytes: int = 128 * MIB
    max_answer_scores: int = 1 << 21
    no_engine_wait_seconds: float = 30.0
    client_share: float = 0.5
    upload_window_seconds: float = 10.0
    min_upload_bytes_per_second: int = 8192
    write_timeout_seconds: float = 60.0


class MediaSources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where media may come from besides data: URLs. Empty lists refuse everything else.

    Attributes:
        allowed_domains: exact host names, or ".example.org" for a domain and all below it.
        allow_private_addresses: only for tests on loopback names.
        file_root: folder below which file: URLs may point; "" = file: is refused.
    """

    allowed_domains: tuple[str, ...] = ()
    allow_private_addresses: bool = False
    file_root: str = ""
    fetch_timeout_seconds: float = 10.0
    max_redirects: int = 3


class InjectionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """External injection of preprocessed items; off by default."""

    enabled: bool = False
    api_key_file: str = ""
    namespace: str = "injected"
    trusted: bool = False


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A static engine, or a DNS name whose every address is an engine (`dns` = True)."""

    endpoint: str
    http: str = ""
    dns: bool = False


class RequestDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What applies where a request says nothing, by the requests' own names. It comes before the
    checkpoint's generation_config.json; `chat_template_kwargs` are added one by one."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] = {}


class FrontendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One frontend pod: `processes` HTTP processes share its port.

    Attributes:
        processes: each with its own admission limits; `/metrics` of any shows all.
        processor_bytes: processor cache of each process; 0 = off.
        media_workers: processes that decode and run HF processors, of the whole pod; 0 = from the
            CPU quota.
        shm_directory, shm_bytes: shared-memory values (`ipc_type` = "shm") of the whole pod.
        shm_min_value_bytes: smaller values go inline: they are not worth a file.
        allowed_origins: origins of web pages whose scripts may call this server (CORS), such as
            https://app.example.org; "*" is any. Empty: none.
        ignore_unknown_options: request options that this server does not know are left out, not
            refused.
        media_embeds: images may come as encoder outputs (`image_embeds` parts).
        task: what is served: generated text, embeddings or both. Engines can do either.
        pooling: what an embedding is made of; "": as the checkpoint says, else its last token.
        chat_template: its text (Jinja), in place of the checkpoint's; "": the checkpoint's.
        tool_format: how the model writes tool calls; "": as its chat template does.
        page: the chat page answers at `/`.
        metrics_peers: other processes whose /metrics this one's /metrics also shows (local mode).
        loopback: beside `host`, listen on the loopback address of its family: what `kubectl
            port-forward` connects to.
    """

    frontend_id: str = "frontend-0"
    model: ModelConfig
    modalities: ModalitiesConfig = ModalitiesConfig()
    host: str = "127.0.0.1"
    port: int = 8000
    loopback: bool = False
    processes: int = 1
    engines: tuple[EngineAddress, ...] = ()
    curve: CurveKeys = CurveKeys()
    node: str = ""
    processor_bytes: int = 4 * GIB
    ipc_type: Literal["inline", "shm"] = "inline"
    shm_directory: str = ""
    shm_bytes: int = 0
    shm_min_value_bytes: int = 16 * 1024
    media_workers: int = 0
    max_uuid_length: int = 256
    max_bindings: int = 16384
    media_sources: MediaSources = MediaSources()
    admission: Admission = Admission()
    injection: InjectionConfig = InjectionConfig()
    api_key_file: str = ""
    admin_key_file: str = ""
    tenant_salt_header: str = ""
    allowed_origins: tuple[str, ...] = ()
    ignore_unknown_options: bool = False
    media_embeds: bool = False
    task: Task = "generate"
    pooling: Pooling | Literal[""] = ""
    chat_template: str = ""
    tool_format: ToolFormat | Literal[""] = ""
    request_defaults: RequestDefaults = RequestDefaults()
    page: bool = True
    drain_timeout_seconds: float = 120.0
    metrics_peers: tuple[str, ...] = ()
    log_format: Literal["auto", "text", "json"] = "auto"


_POD_FIELD = re.compile(r"\$\((POD_NAME|POD_IP|POD_HOST|NODE_NAME)\)")


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Fills in what only a pod knows: $(POD_NAME), $(POD_IP), $(POD_HOST), $(NODE_NAME).

    All pods of a role share one immutable document; the downward API sets the variables. POD_HOST
    is POD_IP as it stands in an address: in brackets when it is IPv6. Raises StartupError for a
    variable that is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = "POD_IP" if match[1] == "POD_HOST" else match[1]
        found = environment.get(name)
        if not found:
            raise StartupError(f"the document asks for $({match[1]}) and {name} is not set")
        if match[1] == "POD_HOST" and ":" in found:
            found = f"[{found}]"
        return json.dumps(found)[1:-1]

    return _POD_FIELD.sub(value, text)


def read_text(path: str | Path, complaint: str) -> str:
    """Of a file. Raises StartupError: the complaint, and why."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartupError(f"{complaint}: {reason}") from error


def load(
    path: str | Path,
    kind: type[EngineConfig] | type[FrontendConfig],
    environment: Mapping[str, str] | None = None,
) -> msgspec.Struct:
    """Reads a JSON document; pod fields are taken from `environment` (default: the process's).

    Raises StartupError naming file, field and value.
    """
    text = read_text(path, f"cannot read configuration {path}")
    try:
        expanded = expand(text, os.environ if environment is None else environment)
        return msgspec.json.decode(expanded, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise StartupError(f"configuration {path}: {error}") from error
