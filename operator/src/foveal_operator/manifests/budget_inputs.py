"""From a parsed resource and facts about nodes to the planner's inputs, and back to documents.

Called by the reconciler and the CLI. The one place that knows which field of the resource feeds
which number of plan/; it computes none itself.
"""

from __future__ import annotations

import msgspec

from foveal_operator.api.caches import IpcCache, Modalities
from foveal_operator.api.parse import InferenceSpec
from foveal_operator.api.rules import size_of
from foveal_runtime.plan.budget.types import BudgetInputs, EngineInputs, FrontendInputs
from foveal_runtime.plan.config import GIB, ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.quantity import parse_bytes


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes, and the image that runs there, offer. 0 = not known.

    Attributes:
        node_bytes: allocatable memory of the largest node a pod could run on.
        device_bytes: memory of one device, as node labels or device attributes tell: the smallest.
        largest_device_bytes: the same of the largest where CEL, which the scheduler evaluates,
            picks devices: what accelerator.memory may be. 0 = device_bytes.
        takes_snapshots: the runtime image knows caches.snapshot_bytes; an older one refuses it.
    """

    node_bytes: int = 0
    device_bytes: int = 0
    largest_device_bytes: int = 0
    takes_snapshots: bool = True


def budget_inputs(inference: InferenceSpec, facts: NodeFacts) -> BudgetInputs:
    """The planner's view of a resource."""
    spec = inference.spec
    frontend, engine, caches = spec.frontend, spec.engine, spec.caches
    is_cpu = engine.accelerator.type == "CPU"
    return BudgetInputs(
        frontend=FrontendInputs(
            processes=frontend.processes,
            media_workers=frontend.media_workers,
            limit_bytes=size_of(frontend.host_memory),
            processor_bytes=size_of(caches.processor.size),
            max_media_bytes=parse_bytes(frontend.admission.max_media),
            max_body_bytes=parse_bytes(frontend.admission.max_body),
            shm_bytes=shared_value_bytes(caches.ipc),
        ),
        engine=EngineInputs(
            num_engines=max(1, inference.num_engines),
            limit_bytes=size_of(engine.host_memory),
            device="cpu" if is_cpu else "gpu",
            num_devices=engine.num_devices,
            devices_field=(
                "engine.parallelism.tensor"
                if engine.parallelism.tensor
                else "engine.accelerator.count"
            ),
            device_bytes=size_of(engine.accelerator.memory) or facts.device_bytes,
            found_device_bytes=facts.largest_device_bytes or facts.device_bytes,
            max_model_len=engine.max_model_len or 0,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_encoder_input_tokens=engine.max_num_encoder_input_tokens or 0,
            disable_chunked_mm_input=engine.disable_chunked_multi_modal_input,
            block_size=engine.block_size,
            ipc_bytes=size_of(caches.ipc.size),
            encoder_bytes=size_of(caches.encoder.size),
            encoder_embeds=caches.encoder.tokens or 0,
            encoder_host_bytes=size_of(caches.encoder.host_size),
            kv_bytes=size_of(caches.kv.size),
            kv_dtype=caches.kv.dtype,
            prefix_caching=engine.prefix_caching and facts.takes_snapshots,
            lora_bytes=parse_bytes(engine.lora.memory) if engine.lora else 0,
            generates=spec.model.task != "Embed",
        ),
        modalities=modalities_config(spec.modalities),
        headroom_percent=caches.headroom_percent,
        on_misfit=caches.on_misfit,
        node_bytes=facts.node_bytes,
    )


def shared_value_bytes(ipc: IpcCache) -> int:
    """Values that one frontend may have on the shared volume. They are charged to the frontend, so
    Auto is a fixed size and no share of the engine's memory."""
    if ipc.type != "SharedMemory":
        return 0
    pinned = size_of(ipc.size)
    return GIB if pinned is None else pinned


def modalities_config(modalities: Modalities) -> ModalitiesConfig:
    """The limits as the processes read them."""
    image, video, audio = modalities.image, modalities.video, modalities.audio
    return ModalitiesConfig(
        image=ModalityLimits(
            max_per_prompt=image.max_per_prompt,
            max_bytes=parse_bytes(image.max_size),
            max_pixels=image.max_pixels,
            resize_pixels=image.resize_to_pixels or 0,
            max_pages=image.max_pages,
        ),
        video=ModalityLimits(
            max_per_prompt=video.max_per_prompt,
            max_bytes=parse_bytes(video.max_size),
            max_pixels=video.max_pixels,
            resize_pixels=video.resize_to_pixels,
            max_seconds=float(video.max_seconds),
            max_frames=video.max_frames,
        ),
        audio=ModalityLimits(
            max_per_prompt=audio.max_per_prompt,
            max_bytes=parse_bytes(audio.max_size),
            max_seconds=float(audio.max_seconds),
        ),
    )
