"""The two roles of the resource, frontend and engine: replicas, resources, limits of a step.

Part of the tree in spec.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from foveal_operator.api.autoscaling import EngineAutoscaling, FrontendAutoscaling
from foveal_operator.api.rules import (
    Cpus,
    LabelName,
    Part,
    Quantity,
    Rule,
    Text,
    bounded,
)
from foveal_runtime.plan.config import RequestDefaults, ToolFormat

Replicas = Annotated[int, Meta(ge=0, le=256)]
NumDevices = Annotated[int, Meta(ge=1, le=16)]
DEFAULT_RESOURCE_NAME = "nvidia.com/gpu"

# What both roles have. Aliases, not a base class: its fields would come first in the schema.
HostMemory = Annotated[
    Quantity | None,
    Meta(description="Memory limit of a pod; default: follows from the cache sizes."),
]
PodTemplate = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema={"x-foveal-raw": True})] | None,
    Meta(
        description="Overlay on the pod template: labels and annotations are added, spec is "
        "merged (named things by name, volumeMounts by mountPath, spread constraints by "
        "topologyKey and whenUnsatisfiable). What the operator derives cannot be changed; of "
        "resources, its container can have limits.cpu and ephemeral-storage. Its volumes can be "
        "mounted if readOnly."
    ),
]
_EITHER = Rule(
    "!(has(self.replicas) && has(self.autoscaling))",
    "set replicas or autoscaling, not both",
    lambda s: s.replicas is None or s.autoscaling is None,
    "replicas",
)
_ONE_DEVICE = (
    "(!has(self.parallelism) || !has(self.parallelism.tensor)"
    " || self.parallelism.tensor == 1) && (!has(self.accelerator)"
    " || !has(self.accelerator.count) || self.accelerator.count == 1)"
)


class Admission(Part, frozen=True, kw_only=True):
    """When a frontend process says 429 or 503, before it decodes anything."""

    max_requests: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)],
        Meta(description="Requests of one process. Default: 512."),
    ] = 512
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000_000)],
        Meta(description="Prompt tokens of one process. Default: 2000000."),
    ] = 2_000_000
    max_media: Annotated[
        Quantity, Meta(description="Encoded media in flight in one process. Default: 512Mi.")
    ] = "512Mi"
    max_body: Annotated[Quantity, Meta(description="One request body. Default: 128Mi.")] = "128Mi"


class Frontend(Part, frozen=True, kw_only=True):
    """CPU pods: HTTP, tokenizer, media, preprocessing, routing. Changes never touch engines."""

    RULES: ClassVar[tuple[Rule, ...]] = (_EITHER,)
    replicas: Annotated[Replicas | None, Meta(description="Pods. Default: 1.")] = None
    autoscaling: Annotated[FrontendAutoscaling | None, Meta(description="Instead of replicas.")] = (
        None
    )
    processes: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        Meta(description="HTTP processes of a pod, each with its processor cache. Default: 1."),
    ] = 1
    media_workers: Annotated[
        Annotated[int, Meta(ge=1, le=128)],
        Meta(description="Processes that preprocess media, per pod. Default: 2."),
    ] = 2
    unknown_options: Annotated[
        Literal["Refuse", "Ignore"],
        Meta(description="Request options that the server does not know. Default: Refuse."),
    ] = "Refuse"
    media_embeds: Annotated[
        bool,
        Meta(description="Images may come as encoder outputs (image_embeds). Default: false."),
    ] = False
    chat_template: Annotated[
        Annotated[str, Meta(min_length=1, max_length=131_072)] | None,
        Meta(description="Text (Jinja) of the chat template; default: the checkpoint's."),
    ] = None
    request_defaults: Annotated[
        Annotated[RequestDefaults, Meta(extra_json_schema={"x-foveal-raw": True})] | None,
        Meta(
            description="What applies where a request names no temperature, top_p, top_k, min_p, "
            "repetition_penalty, max_tokens or chat_template_kwargs."
        ),
    ] = None
    tool_format: Annotated[
        ToolFormat | None,
        Meta(description="How the model writes tool calls; default: as its chat template does."),
    ] = None
    page: Annotated[bool, Meta(description="Chat page at /. Default: true.")] = True
    admission: Annotated[Admission, Meta(description="Limits before work begins.")] = Admission()
    host_memory: HostMemory = None
    cpu: Annotated[
        Cpus | None,
        Meta(description="CPUs requested by a pod; default: one for each process and worker."),
    ] = None
    pod_template: PodTemplate = None


class Accelerator(Part, frozen=True, kw_only=True):
    """The devices of one engine."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.resourceName) && has(self.deviceClassName))",
            "set resourceName or deviceClassName, not both",
            lambda s: s.resource_name is None or s.device_class_name is None,
            "deviceClassName",
        ),
        Rule(
            "!has(self.deviceSelectors) || self.deviceSelectors.size() == 0"
            " || has(self.deviceClassName)",
            "deviceSelectors need deviceClassName",
            lambda s: not s.device_selectors or s.device_class_name is not None,
            "deviceSelectors",
        ),
        Rule(
            "!has(self.type) || self.type != 'CPU' || !(has(self.resourceName)"
            " || has(self.deviceClassName) || has(self.memory)"
            " || (has(self.count) && self.count > 1))",
            "type CPU has no devices: remove resourceName, deviceClassName, memory and count",
            lambda s: (
                s.type != "CPU"
                or (
                    s.resource_name is None
                    and s.device_class_name is None
                    and s.memory is None
                    and s.count in (None, 1)
                )
            ),
            "type",
        ),
    )
    type: Annotated[
        Literal["GPU", "CPU"], Meta(description="GPU (default), or CPU for small models.")
    ] = "GPU"
    resource_name: Annotated[
        Annotated[str, Meta(max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] | None,
        Meta(description="Extended resource to request. Default: nvidia.com/gpu."),
    ] = None
    device_class_name: Annotated[
        Annotated[str, Meta(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] | None,
        Meta(description="DeviceClass to claim from (dynamic resource allocation) instead."),
    ] = None
    device_selectors: Annotated[
        Annotated[
            tuple[Annotated[str, Meta(max_length=1024, min_length=1)], ...], Meta(max_length=8)
        ],
        Meta(description="CEL expressions that each claimed device must meet."),
    ] = ()
    count: Annotated[
        NumDevices | None,
        Meta(description="Devices of one engine. Default: parallelism.tensor, or 1."),
    ] = None
    memory: Annotated[
        Quantity | None,
        Meta(description="Memory of one device; default: what nodes report."),
    ] = None

    @property
    def extended_resource(self) -> str:
        """What a pod requests its devices as; "" for a CPU and for devices that are claimed."""
        if self.type == "CPU" or self.device_class_name:
            return ""
        return self.resource_name or DEFAULT_RESOURCE_NAME


class Parallelism(Part, frozen=True, kw_only=True):
    """How an engine's devices share the model."""

    tensor: Annotated[
        NumDevices | None,
        Meta(
            description="Devices that share every layer. Default: accelerator.count. The heads of "
            "every layer must divide evenly by it."
        ),
    ] = None


class LoraAdapter(Part, frozen=True, kw_only=True):
    """A LoRA adapter in PEFT's format."""

    name: Annotated[Text, Meta(description="What clients put into `model` for it.")]
    path: Annotated[
        Annotated[str, bounded(1024)],
        Meta(
            description="Its directory: below the model's, or absolute on a volume of podTemplate."
        ),
    ]


class Lora(Part, frozen=True, kw_only=True):
    """LoRA adapters to the model. Engines of one device serve them."""

    memory: Annotated[
        Quantity,
        Meta(description="Of the device, for all adapters, those loaded later included."),
    ]
    adapters: Annotated[
        Annotated[
            tuple[LoraAdapter, ...],
            Meta(max_length=64, extra_json_schema={"x-foveal-list-map": "name"}),
        ],
        Meta(description="Adapters that are loaded at the start."),
    ] = ()


class Engine(Part, frozen=True, kw_only=True):
    """Pods that run the model; one replica is one engine core."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        _EITHER,
        Rule(
            "!has(self.parallelism) || !has(self.parallelism.tensor) || !has(self.accelerator)"
            " || !has(self.accelerator.count)"
            " || self.accelerator.count == self.parallelism.tensor",
            "parallelism.tensor takes every device: accelerator.count must be the same, or absent",
            lambda s: (
                None in (s.parallelism.tensor, s.accelerator.count)
                or s.parallelism.tensor == s.accelerator.count
            ),
            "parallelism.tensor",
        ),
        Rule(
            "!has(self.parallelism) || !has(self.parallelism.tensor)"
            " || self.parallelism.tensor == 1 || !has(self.accelerator)"
            " || !has(self.accelerator.type) || self.accelerator.type != 'CPU'",
            "type CPU has no devices that could share a model: remove parallelism.tensor",
            lambda s: s.parallelism.tensor in (None, 1) or s.accelerator.type != "CPU",
            "parallelism.tensor",
        ),
        Rule(
            f"!has(self.lora) || ({_ONE_DEVICE})",
            "LoRA adapters run on one device: remove lora, or set one device",
            lambda s: s.lora is None or s.num_devices == 1,
            "lora",
        ),
        Rule(
            f"!has(self.quantization) || self.quantization == 'auto' || ({_ONE_DEVICE})",
            "weights that are quantised at load run on one device: remove quantization, or set one "
            "device",
            lambda s: s.quantization == "auto" or s.num_devices == 1,
            "quantization",
        ),
    )
    replicas: Annotated[Replicas | None, Meta(description="Engines. Default: 1.")] = None
    autoscaling: Annotated[EngineAutoscaling | None, Meta(description="Instead of replicas.")] = (
        None
    )
    queue_name: Annotated[
        LabelName | None,
        Meta(description="Kueue's LocalQueue that admits engine pods; they wait without it."),
    ] = None
    accelerator: Annotated[Accelerator, Meta(description="Devices of an engine.")] = Accelerator()
    parallelism: Annotated[
        Parallelism, Meta(description="How an engine's devices share the model.")
    ] = Parallelism()
    max_model_len: Annotated[
        Annotated[int, Meta(ge=16, le=10_485_760)] | None,
        Meta(description="Prompt and output tokens of a request; default: the model's limit."),
    ] = None
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=4096)],
        Meta(description="Requests of one step. Default: 128."),
    ] = 128
    max_num_batched_tokens: Annotated[
        Annotated[int, Meta(ge=16, le=1_048_576)],
        Meta(description="Tokens of one step. Default: 2048."),
    ] = 2048
    max_num_mixed_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_048_576)] | None,
        Meta(
            description="Tokens of a step beside running streams, so that prompts do not stall "
            "them. Default: on CPUs what takes 0.6 s or 30 (short texts: 2) times a step without "
            "prompts, at most 256 (512 in bfloat16)."
        ),
    ] = None
    target_itl_milliseconds: Annotated[
        Annotated[int, Meta(ge=1, le=60_000)] | None,
        Meta(
            description="Time between two tokens of a stream to keep to beside prompts; overrides "
            "maxNumMixedTokens. Default: none."
        ),
    ] = None
    num_speculative_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=16)],
        Meta(description="Tokens guessed from a stream's text for a step to check. Default: 0."),
    ] = 0
    max_num_encoder_input_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=16_777_216)] | None,
        Meta(description="Embeddings encoded in one step; default: maxNumBatchedTokens."),
    ] = None
    disable_chunked_multi_modal_input: Annotated[
        bool, Meta(description="Never split an item over two steps. Default: false.")
    ] = False
    prefix_caching: Annotated[
        bool, Meta(description="Reuse KV of shared prefixes. Default: true.")
    ] = True
    max_waiting: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)],
        Meta(description="Requests that may wait in an engine; more are refused. Default: 1024."),
    ] = 1024
    run_ahead: Annotated[
        Literal["Auto", "Enabled", "Disabled"],
        Meta(
            description="Submit a decode step before the last one's result is read. Auto "
            "(default): on a GPU."
        ),
    ] = "Auto"
    cuda_graphs: Annotated[
        bool, Meta(description="Record decode steps and play them. On GPUs. Default: true.")
    ] = True
    block_size: Annotated[
        Literal[8, 16, 32, 64, 128], Meta(description="Tokens of a KV block. Default: 16.")
    ] = 16
    scheduling_policy: Annotated[
        Literal["FCFS", "Priority"], Meta(description="Order of waiting requests. Default: FCFS.")
    ] = "FCFS"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="Weights and activations. auto (default): the checkpoint's."),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "int8", "int4"],
        Meta(
            description="What the decoder's weights are quantised to while they are loaded. auto "
            "(default): they stay as in the checkpoint."
        ),
    ] = "auto"
    attention: Annotated[Text, Meta(description="Attention backend. auto (default) chooses.")] = (
        "auto"
    )
    lora: Annotated[
        Lora | None, Meta(description="LoRA adapters that requests name as their model.")
    ] = None
    host_memory: HostMemory = None
    cpu: Annotated[
        Cpus | None,
        Meta(description="CPUs requested by a pod; default: 4 for each device, 4 on a CPU."),
    ] = None
    pod_template: PodTemplate = None

    @property
    def num_devices(self) -> int:
        """Devices of one engine, all of them used by tensor parallelism."""
        return self.accelerator.count or self.parallelism.tensor or 1
