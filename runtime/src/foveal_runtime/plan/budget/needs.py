"""Memory needs of a spec before any limit applies: floors, defaults, refusals.

Called by planner.py only. Turns settings and profile into pools (what may vary) and the few sizes
that follow from limits on requests; finds the settings that no memory could make work.
"""

from __future__ import annotations

import msgspec

from foveal_runtime.plan.budget.encoder import LargestItem, compute_encoder_budget
from foveal_runtime.plan.budget.items import items_under
from foveal_runtime.plan.budget.kv import KVShape
from foveal_runtime.plan.budget.pools import Pool
from foveal_runtime.plan.budget.types import (
    DEFAULT_IPC_BYTES,
    DEFAULT_KV_CPU_BYTES,
    DEFAULT_PROCESSOR_BYTES,
    IPC_STAGING_MIN_BYTES,
    MIRROR_MIN_ENGINES,
    RANK_SHM_BYTES,
    SHM_BYTES,
    BudgetInputs,
    Problem,
)
from foveal_runtime.plan.config import GIB, MIB, ModalitiesConfig
from foveal_runtime.plan.profile import ItemProfile, ModelProfile
from foveal_runtime.plan.quantity import format_gib

DEFAULT_ENCODER_HOST_BYTES = 1 * GIB


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Pools by place and the sizes beside them; sizes are bytes, of one engine or one pod."""

    items: dict[str, ItemProfile]
    max_model_len: int
    kv: KVShape
    bytes_per_embed: int
    encoder_compute_embeds: int
    request_embeds: int
    activation_bytes: int
    decode_peak_bytes: int
    image_work_bytes: int
    largest_item_bytes: int
    mirror_engines: int
    num_ranks: int
    frontend_shm_bytes: int
    engine_shm_bytes: int
    ipc_staging_bytes: int
    frontend_pools: tuple[Pool, ...]
    engine_pools: tuple[Pool, ...]
    device_pools: tuple[Pool, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def derive_needs(inputs: BudgetInputs, profile: ModelProfile) -> Needs:
    engine = inputs.engine
    applicable = items_under(profile, inputs.modalities)
    items = applicable.by_name
    step = [engine.max_num_batched_tokens] if profile.is_encoder else []  # takes a whole text
    max_len = min(engine.max_model_len or profile.max_model_len, profile.max_model_len, *step)
    problems = [
        *applicable.problems,
        *_ranks_problems(inputs, profile),
        *_context_problems(inputs, profile, items, max_len),
    ]
    request_embeds = _request_embeds(inputs.modalities, items, max_len)
    compute_embeds, encoder_pool = _encoder(inputs, profile, items, request_embeds, problems)
    largest_bytes = max((item.processed_bytes for item in items.values()), default=0)
    image_work_bytes = _image_work(inputs.modalities, profile, items)
    staging = _ipc_staging(inputs, items, max_len)
    # KV of all ranks together; a block is the unit in which it is given out.
    kv = KVShape(
        block_size=engine.block_size,
        block_bytes=engine.block_size * profile.kv_token_bytes(engine.kv_dtype),
        window_block_bytes=engine.block_size * profile.window_token_bytes(engine.kv_dtype),
        window=profile.window,
        step_tokens=engine.max_num_batched_tokens,
        max_model_len=max_len,
    )
    ranks = engine.num_devices if engine.device == "gpu" else 1
    kv_pool = _kv_pool(inputs, profile, kv, ranks)
    problems += _kv_problems(inputs, kv)
    host_pools = (
        _encoder_host_pool(engine.encoder_host_bytes, bool(items)),
        _ipc_pool(engine.ipc_bytes, largest_bytes),
    )
    compute_pools = (encoder_pool, kv_pool, *_snapshot_pools(inputs, profile))
    return Needs(
        items=items,
        max_model_len=max_len,
        kv=kv,
        bytes_per_embed=profile.bytes_per_embed,
        encoder_compute_embeds=compute_embeds,
        request_embeds=request_embeds,
        activation_bytes=_activations(inputs, profile, items, compute_embeds, ranks),
        decode_peak_bytes=_decode_peak(inputs.modalities, items, image_work_bytes),
        image_work_bytes=image_work_bytes,
        mirror_engines=max(MIRROR_MIN_ENGINES, 1 << (engine.num_engines - 1).bit_length()),
        num_ranks=ranks,
        largest_item_bytes=largest_bytes,
        frontend_shm_bytes=SHM_BYTES,
        engine_shm_bytes=SHM_BYTES if ranks == 1 else RANK_SHM_BYTES * ranks,
        ipc_staging_bytes=staging,
        frontend_pools=(
            Pool(
                name="processor",
                pinned=inputs.frontend.processor_bytes,
                floor=_whole_mib(largest_bytes),
                default=DEFAULT_PROCESSOR_BYTES if items else 0,
                share=1 if items else 0,
                count=inputs.frontend.processes,
                granule=MIB,
            ),
        ),
        engine_pools=(*host_pools, *compute_pools) if engine.device == "cpu" else host_pools,
        device_pools=compute_pools,
        problems=tuple(problems),
        notes=(
            *_notes(inputs, profile, items, largest_bytes),
            *applicable.notes,
            *_window_notes(inputs, profile, kv),
        ),
    )


def _kv_problems(inputs: BudgetInputs, kv: KVShape) -> list[Problem]:
    engine = inputs.engine
    if engine.kv_bytes is None or engine.kv_bytes >= kv.floor_bytes:
        return []
    return [
        Problem(
            reason="KVTooSmall",
            place="engine" if engine.device == "cpu" else "device",
            term="kv",
            needed=kv.floor_bytes,
            available=engine.kv_bytes,
            unit="bytes",
            detail=f"caches.kv.size holds {kv.num_tokens(engine.kv_bytes)}"
            f" tokens and one request may have {kv.max_model_len}",
        )
    ]


def _activations(
    inputs: BudgetInputs,
    profile: ModelProfile,
    items: dict[str, ItemProfile],
    compute_embeds: int,
    ranks: int,
) -> int:
    """Peak of one step on one device: of the decoder, or of the encoder, which runs before it and
    which every rank runs in full. On a CPU streams may go on between an encoder's layers."""
    engine, whole = inputs.engine, profile.activation_bytes_per_token_whole
    each = whole - (-(profile.activation_bytes_per_token - whole) // ranks)
    decoder = profile.activation_bytes + engine.max_num_batched_tokens * each
    streams = profile.activation_bytes + engine.max_num_seqs * each if engine.device == "cpu" else 0
    encoders = [0]
    for name, item in items.items():
        alone = profile.encoder_bytes(name, item)
        # A step encodes one item, or as many smaller ones as its embeddings allow.
        encoders.append(alone * max(item.num_embeds, compute_embeds) // max(1, item.num_embeds))
    return max(decoder, streams + max(encoders))


def _task_problems(inputs: BudgetInputs, profile: ModelProfile) -> list[Problem]:
    """Refuses to generate with an encoder, as frontends would at their start."""
    if not profile.is_encoder or not inputs.engine.generates:
        return []
    detail = "the model is an encoder: it embeds texts and generates none; set model.task to Embed"
    return [Problem(reason="EncoderTask", place="frontend", term="task", needed=1, available=0,
                    unit="tasks", detail=detail)]  # fmt: skip


def _ranks_problems(inputs: BudgetInputs, profile: ModelProfile) -> list[Problem]:
    """Refuses a number of devices as the engine would."""
    engine, possible = inputs.engine, profile.possible_ranks()
    ranks = engine.num_devices if engine.device == "gpu" else 1
    if not possible or ranks in possible:
        return []
    what = (
        f"quantised weights ({profile.quantization})" if profile.quantization
        else "recurrent states" if profile.state_bytes
        else "an encoder" if profile.is_encoder
        else f"the model's {profile.num_heads} query and {profile.num_kv_heads} key/value heads"
    )  # fmt: skip
    return [
        Problem(
            reason="DeviceCount",
            place="engine",
            term="devices",
            needed=ranks,
            available=possible[-1],
            unit="devices",
            detail=f"{engine.devices_field} is {ranks} and {what} cannot be shared evenly by so "
            f"many devices; possible are {', '.join(map(str, possible))}"
            + (", or more without quantisation" if "at load" in profile.quantization else ""),
        )
    ]


def _window_notes(inputs: BudgetInputs, profile: ModelProfile, kv: KVShape) -> list[str]:
    """What layers with a sliding window keep of a request."""
    max_len = kv.max_model_len
    if kv.has_windows:
        each = kv.request_blocks.window * kv.window_block_bytes
        return [
            f"layers with a sliding window of {profile.window} tokens have a pool of their own: of "
            f"a request of {max_len} tokens they keep at most {format_gib(each)} of KV"
        ]
    if not profile.window_kv_bytes_per_token or max_len <= profile.window:
        return []
    kept = profile.kv_token_bytes(inputs.engine.kv_dtype) / profile.kv_bytes_per_token
    beyond = (max_len - profile.window) * profile.window_kv_bytes_per_token * kept
    return [
        f"layers with a sliding window of {profile.window} tokens keep all tokens of a request: "
        f"of a request of {max_len} tokens {format_gib(int(beyond))} of KV lie outside the window"
    ]


def _kv_pool(inputs: BudgetInputs, profile: ModelProfile, kv: KVShape, ranks: int) -> Pool:
    """One rank's part. An encoder keeps nothing after a prompt's step: it needs what two steps
    compute, the second of which may begin before the first one's blocks are free."""
    engine, floor = inputs.engine, kv.floor_bytes
    wanted = engine.max_num_seqs * floor
    if profile.is_encoder:
        step = engine.max_num_batched_tokens // engine.block_size + engine.max_num_seqs
        wanted = min(wanted, (2 * step + 1) * kv.block_bytes)  # one for padding
    default = max(floor, min(DEFAULT_KV_CPU_BYTES, wanted))
    return Pool(
        name="kv",
        pinned=None if engine.kv_bytes is None else -(-engine.kv_bytes // ranks),
        floor=-(-floor // ranks),
        default=-(-default // ranks),
        share=0 if profile.is_encoder else 2,
        granule=max(1, kv.block_bytes // ranks),
    )


def _snapshot_pools(inputs: BudgetInputs, profile: ModelProfile) -> tuple[Pool, ...]:
    """Snapshots of recurrent state: without any, no prefix is reused. A conversation of some
    thousand tokens needs two or three, which take about half the memory of its KV."""
    engine, each = inputs.engine, profile.state_bytes
    if not each or not engine.prefix_caching:
        return ()
    default = min(DEFAULT_KV_CPU_BYTES // 2, 2 * engine.max_num_seqs * each)
    return (Pool(name="snapshots", pinned=None, floor=0, default=default - default % each,
                 share=1, granule=each),)  # fmt: skip


def _image_work(
    modalities: ModalitiesConfig, profile: ModelProfile, items: dict[str, ItemProfile]
) -> int:
    """What the largest image takes at work, as measured; 0 = not measured."""
    if "image" not in items:
        return 0
    per_pixel = profile.processes.worker_bytes_per_pixel
    return _whole_mib(per_pixel * modalities.image.max_pixels)


def _whole_mib(size: int) -> int:
    return -(-size // MIB) * MIB


def _ipc_pool(pinned: int | None, largest_bytes: int) -> Pool:
    return Pool(
        name="ipc",
        pinned=pinned,
        floor=_whole_mib(largest_bytes),
        default=DEFAULT_IPC_BYTES if largest_bytes else 0,
        share=2 if largest_bytes else 0,
        granule=MIB,
    )


def _encoder_host_pool(pinned: int | None, has_items: bool) -> Pool:
    return Pool(
        name="encoderHost",
        pinned=pinned,
        floor=0,
        default=DEFAULT_ENCODER_HOST_BYTES if has_items else 0,
        share=1 if has_items else 0,
        granule=MIB,
    )


def _ipc_staging(inputs: BudgetInputs, items: dict[str, ItemProfile], max_len: int) -> int:
    """S holds the items of the largest request: as many as limits and context allow."""
    if not items:
        return IPC_STAGING_MIN_BYTES
    request = sum(
        item.processed_bytes
        * min(
            getattr(inputs.modalities, name).max_per_prompt,
            max(1, max_len // max(1, item.num_tokens)),
        )
        for name, item in items.items()
    )
    return max(IPC_STAGING_MIN_BYTES, _whole_mib(request))


def _decode_peak(
    modalities: ModalitiesConfig, items: dict[str, ItemProfile], measured_bytes: int
) -> int:
    """What one media worker takes at most for an item: as measured with the largest image, or the
    decoded item and two copies of the processed one, whichever is more."""
    peaks = [measured_bytes]
    for name, item in items.items():
        limits = getattr(modalities, name)
        decoded = {
            "image": limits.max_pixels * 3,
            "video": item.processed_bytes,
            "audio": int(limits.max_seconds * 48_000 * 4),
        }[name]
        peaks.append(decoded + 2 * item.processed_bytes)
    return _whole_mib(max(peaks))


def _request_embeds(
    modalities: ModalitiesConfig, items: dict[str, ItemProfile], max_len: int
) -> int:
    """Encoder outputs of the largest media that one request may bring: limits per prompt and the
    context bound them, and what takes most outputs a token comes first."""
    left, found = max_len - 1, 0
    for name, item in sorted(
        items.items(), key=lambda entry: -entry[1].num_embeds / max(1, entry[1].num_tokens)
    ):
        each = max(1, item.num_tokens)
        tokens = min(getattr(modalities, name).max_per_prompt * each, left)
        found += -(-tokens * item.num_embeds // each)
        left -= tokens
    return found


def _encoder(
    inputs: BudgetInputs,
    profile: ModelProfile,
    items: dict[str, ItemProfile],
    request_embeds: int,
    problems: list[Problem],
) -> tuple[int, Pool]:
    """Compute budget in embeds and the cache's pool in bytes; refuses what an engine would."""
    engine, each = inputs.engine, max(1, profile.bytes_per_embed)
    largest_tokens = max((item.num_tokens for item in items.values()), default=0)
    largest = max((item.num_embeds for item in items.values()), default=0)
    if engine.disable_chunked_mm_input and largest_tokens > engine.max_num_batched_tokens:
        problems.append(
            Problem(
                reason="ChunkedInputOff",
                place="engine",
                term="maxNumBatchedTokens",
                needed=largest_tokens,
                available=engine.max_num_batched_tokens,
                unit="tokens",
                detail=f"chunked multimodal input is off and the largest item takes "
                f"{largest_tokens} tokens, more than the {engine.max_num_batched_tokens} of a step",
            )
        )
    pinned_embeds = None
    if engine.encoder_embeds:
        pinned_embeds = engine.encoder_embeds
    elif engine.encoder_bytes is not None:
        pinned_embeds = engine.encoder_bytes // each
    if pinned_embeds is not None and items and pinned_embeds < largest:
        problems.append(
            Problem(
                reason="EncoderTooSmall",
                place="engine" if engine.device == "cpu" else "device",
                term="encoder",
                needed=largest,
                available=pinned_embeds,
                unit="embeds",
                detail=f"the encoder cache is pinned to {pinned_embeds} embeds and the largest "
                f"item has {largest}",
            )
        )
    budget = compute_encoder_budget(
        is_multimodal=bool(items),  # without any, the notes say so
        largest={n: LargestItem(i.num_tokens, i.num_embeds) for n, i in items.items()},
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_encoder_input_tokens=engine.max_num_encoder_input_tokens
        or engine.max_num_batched_tokens,
        encoder_cache_size=engine.max_num_batched_tokens,
    )
    pool = Pool(
        name="encoder",
        pinned=None if pinned_embeds is None or not items else pinned_embeds * each,
        floor=largest * each,
        default=budget.cache_embeds * each,
        wish=request_embeds * each,
        granule=each,
    )
    return budget.compute_embeds, pool


def _context_problems(
    inputs: BudgetInputs, profile: ModelProfile, items: dict[str, ItemProfile], max_len: int
) -> list[Problem]:
    found = _task_problems(inputs, profile)
    if inputs.engine.max_model_len > profile.max_model_len:
        found.append(
            Problem(
                reason="ContextTooLong",
                place="engine",
                term="maxModelLen",
                needed=inputs.engine.max_model_len,
                available=profile.max_model_len,
                unit="tokens",
                detail=f"engine.maxModelLen is {inputs.engine.max_model_len} and the model ends "
                f"at {profile.max_model_len} tokens",
            )
        )
    for name, item in items.items():
        if item.num_tokens >= max_len:
            found.append(
                Problem(
                    reason="ContextTooShort",
                    place="engine",
                    term=name,
                    needed=item.num_tokens + 1,
                    available=max_len,
                    unit="tokens",
                    detail=f"the largest {name} takes {item.num_tokens} tokens, so a request with "
                    f"one needs {item.num_tokens + 1}, and a context has {max_len}",
                )
            )
    return found


def _notes(
    inputs: BudgetInputs, profile: ModelProfile, items: dict[str, ItemProfile], largest: int
) -> tuple[str, ...]:
    notes = []
    if profile.is_multimodal and not items:
        notes.append("every modality is switched off: the model serves text only")
    pinned = inputs.engine.ipc_bytes
    if pinned is not None and items and pinned < largest:
        notes.append("the largest items exceed caches.ipc.size and bypass the cache")
    processor = inputs.frontend.processor_bytes
    if processor is not None and items and processor < largest:
        notes.append("the largest items exceed caches.processor.size and are processed every time")
    return tuple(notes)
