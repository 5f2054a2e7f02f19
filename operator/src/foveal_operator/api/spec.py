"""The MultiModalInference resource: every field typed, described and bounded, once.

crd.py generates the CustomResourceDefinition from these structs; parse.py parses resources into
them. The defaults below are the operator's behaviour, never defaults of the schema: a default
inside a served schema could roll every tenant's pods.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from foveal_operator.api.caches import CacheSettings, Modalities
from foveal_operator.api.model import Model
from foveal_operator.api.operations import Networking, Observability, Rollout, Security
from foveal_operator.api.rules import Part, Rule, pinned_sum_below
from foveal_operator.api.workloads import Engine, Frontend


class MultiModalInferenceSpec(Part, frozen=True, kw_only=True):
    """What to serve and how; only model.uri is required."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.engine) || !has(self.engine.hostMemory) || !has(self.caches)"
            " || !has(self.caches.ipc) || !has(self.caches.ipc.size)"
            " || !isQuantity(self.caches.ipc.size) || !isQuantity(self.engine.hostMemory)"
            " || quantity(self.caches.ipc.size).isLessThan(quantity(self.engine.hostMemory))",
            "caches.ipc.size must be below engine.hostMemory",
            lambda s: pinned_sum_below(s.engine.host_memory, s.caches.ipc.size),
            "caches.ipc.size",
        ),
        Rule(
            "!has(self.frontend) || !has(self.frontend.hostMemory) || !has(self.caches)"
            " || !has(self.caches.processor) || !has(self.caches.processor.size)"
            " || !isQuantity(self.caches.processor.size) || !isQuantity(self.frontend.hostMemory)"
            " || quantity(self.caches.processor.size)"
            ".isLessThan(quantity(self.frontend.hostMemory))",
            "caches.processor.size must be below frontend.hostMemory",
            lambda s: pinned_sum_below(s.frontend.host_memory, s.caches.processor.size),
            "caches.processor.size",
        ),
        Rule(
            "!has(self.engine) || !has(self.engine.accelerator)"
            " || !has(self.engine.accelerator.memory) || !has(self.caches)"
            " || !has(self.caches.encoder) || !has(self.caches.encoder.size)"
            " || !isQuantity(self.caches.encoder.size)"
            " || !isQuantity(self.engine.accelerator.memory)"
            " || quantity(self.caches.encoder.size)"
            ".isLessThan(quantity(self.engine.accelerator.memory))",
            "caches.encoder.size must be below engine.accelerator.memory",
            lambda s: pinned_sum_below(s.engine.accelerator.memory, s.caches.encoder.size),
            "caches.encoder.size",
        ),
        Rule(
            "!has(self.engine) || !has(self.engine.accelerator)"
            " || !has(self.engine.accelerator.memory) || !has(self.caches)"
            " || !has(self.caches.kv) || !has(self.caches.kv.size)"
            " || !isQuantity(self.caches.kv.size) || !isQuantity(self.engine.accelerator.memory)"
            " || (has(self.engine.accelerator.count) && self.engine.accelerator.count > 1)"
            " || (has(self.engine.parallelism) && has(self.engine.parallelism.tensor)"
            " && self.engine.parallelism.tensor > 1)"
            " || quantity(self.caches.kv.size).add(has(self.caches.encoder)"
            " && has(self.caches.encoder.size) && isQuantity(self.caches.encoder.size)"
            " ? quantity(self.caches.encoder.size) : quantity('0'))"
            ".isLessThan(quantity(self.engine.accelerator.memory))",
            "caches.kv.size and caches.encoder.size together must be below "
            "engine.accelerator.memory",
            lambda s: (
                s.engine.num_devices > 1
                or s.caches.kv.size == "Auto"
                or pinned_sum_below(
                    s.engine.accelerator.memory, s.caches.kv.size, s.caches.encoder.size
                )
            ),
            "caches.kv.size",
        ),
        Rule(
            "!has(self.caches) || !has(self.caches.kv) || !has(self.caches.kv.dtype)"
            " || self.caches.kv.dtype != 'fp8' || !has(self.engine)"
            " || !has(self.engine.accelerator) || !has(self.engine.accelerator.type)"
            " || self.engine.accelerator.type != 'CPU'",
            "caches.kv.dtype fp8 is for GPUs; on a CPU use bfloat16",
            lambda s: s.caches.kv.dtype != "fp8" or s.engine.accelerator.type != "CPU",
            "caches.kv.dtype",
        ),
    )
    model: Annotated[Model, Meta(description="Which model to serve.")]
    image: Annotated[
        Annotated[str, Meta(max_length=512, min_length=1, pattern=r"^[^\s]+$")] | None,
        Meta(description="Runtime image; default: the operator's when the resource was made."),
    ] = None
    modalities: Annotated[Modalities, Meta(description="Limits on media.")] = Modalities()
    frontend: Annotated[Frontend, Meta(description="CPU pods: HTTP, media, routing.")] = Frontend()
    engine: Annotated[Engine, Meta(description="Pods that run the model.")] = Engine()
    caches: Annotated[CacheSettings, Meta(description="Cache sizes.")] = CacheSettings()
    rollout: Annotated[Rollout, Meta(description="How pods are replaced.")] = Rollout()
    networking: Annotated[Networking, Meta(description="How clients get in.")] = Networking()
    security: Annotated[Security, Meta(description="Keys, sources, policies.")] = Security()
    observability: Annotated[Observability, Meta(description="Monitoring objects.")] = (
        Observability()
    )
    paused: Annotated[
        bool, Meta(description="True: the operator leaves every object as it is. Default: false.")
    ] = False
