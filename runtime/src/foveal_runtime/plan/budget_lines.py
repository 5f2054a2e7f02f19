"""The rows of the budget table: each term's bytes and its formula in words.

Called by budget.py only. A row says how its figure came about, so that a reader can redo it.
"""

from __future__ import annotations

from foveal_runtime.plan.budget_needs import Needs
from foveal_runtime.plan.budget_types import (
    DEVICE_BASE_BYTES,
    ENGINE_BASE_CPU_BYTES,
    ENGINE_BASE_GPU_BYTES,
    FRONTEND_PROCESS_BYTES,
    LOAD_STAGING_MAX_BYTES,
    MEDIA_WORKER_BYTES,
    MIRROR_BYTES_PER_KEY,
    MIRROR_ITEM_BYTES,
    BudgetInputs,
    Line,
    Place,
    Source,
)
from foveal_runtime.plan.pools import Pool, Shares
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import format_gib


def _line(
    name: str, place: Place, each: int, formula: str, count: int = 1, source: Source = "Derived"
) -> Line:
    return Line(
        name=name,
        place=place,
        bytes=each * count,
        each_bytes=each,
        count=count,
        source=source,
        formula=formula,
    )


def frontend_lines(inputs: BudgetInputs, needs: Needs, ipc_bytes: int) -> tuple[Line, ...]:
    """What a frontend pod needs besides its processor caches."""
    f = inputs.frontend
    keys = ipc_bytes // MIRROR_ITEM_BYTES
    mirror = needs.mirror_engines * keys * MIRROR_BYTES_PER_KEY
    lines = (
        _line("base", "frontend", FRONTEND_PROCESS_BYTES, "HTTP process, measured", f.processes),
        _line(
            "mediaWorkers",
            "frontend",
            MEDIA_WORKER_BYTES + needs.decode_peak_bytes,
            "worker process, measured, + the largest item decoded and processed twice",
            f.media_workers,
        ),
        _line("media", "frontend", f.max_media_bytes, "encoded media admitted", f.processes),
        _line(
            "mirrors",
            "frontend",
            mirror,
            f"{needs.mirror_engines} engines planned x {keys} keys x {MIRROR_BYTES_PER_KEY} B",
            f.processes,
        ),
        _line(
            "shm",
            "frontend",
            needs.frontend_shm_bytes,
            "two processed items in flight for each media worker",
        ),
    )
    if f.shm_bytes == 0:
        return lines
    return (*lines, _line("sharedValues", "frontend", f.shm_bytes, "values on the shared volume"))


def engine_lines(inputs: BudgetInputs, needs: Needs, profile: ModelProfile) -> tuple[Line, ...]:
    """What an engine pod's host memory needs besides its caches."""
    cpu = inputs.engine.device == "cpu"
    base = ENGINE_BASE_CPU_BYTES if cpu else ENGINE_BASE_GPU_BYTES * inputs.engine.num_devices
    what = "engine process with torch, measured" if cpu else "process of each rank with CUDA"
    staging = min(profile.weight_bytes // (4 if cpu else 1), LOAD_STAGING_MAX_BYTES)
    lines = (
        _line("base", "engine", base, what),
        _line("loadStaging", "engine", staging, "weights on their way in, at most 2 GiB"),
        _line(
            "ipcStaging",
            "engine",
            needs.ipc_staging_bytes,
            "items of the largest request, on their way and past the cache",
        ),
        _line("shm", "engine", needs.engine_shm_bytes, "memory-backed /dev/shm, its size limit"),
    )
    return (*lines, *_model_lines("engine", 1, inputs, profile)) if cpu else lines


def device_lines(inputs: BudgetInputs, needs: Needs, profile: ModelProfile) -> tuple[Line, ...]:
    """What one device needs besides encoder cache and KV."""
    ranks = inputs.engine.num_devices
    base = _line("deviceBase", "device", DEVICE_BASE_BYTES, "CUDA context, workspaces, buffers")
    return (base, *_model_lines("device", ranks, inputs, profile))


def _model_lines(
    place: Place, ranks: int, inputs: BudgetInputs, profile: ModelProfile
) -> tuple[Line, ...]:
    source: Source = "Measured" if profile.source == "measured" else "Derived"
    share = "" if ranks == 1 else f" / {ranks} devices"
    tokens = inputs.engine.max_num_batched_tokens
    activation = profile.activation_bytes + profile.activation_bytes_per_token * tokens
    return (
        _line(
            "weights",
            place,
            -(-profile.weight_bytes // ranks),
            f"all parameters{share}",
            source=source,
        ),
        _line(
            "activations",
            place,
            -(-activation // ranks),
            f"peak of one step of {tokens} tokens{share}",
            source=source,
        ),
    )


def cache_line(
    pool: Pool, shares: Shares, place: Place, needs: Needs, profile: ModelProfile, why: str
) -> Line:
    """One cache: how it was sized, and its size counted in what it holds."""
    size = shares.sizes[pool.name]
    source: Source = "Derived"
    if pool.name in shares.shrunk:
        source, formula = "Shrunk", f"pinned {format_gib(pool.pinned or 0)}, reduced to fit"
    elif pool.pinned is not None:
        source, formula = "Pinned", "off" if size == 0 else "as pinned"
    elif pool.name == "encoder":
        formula = _encoder_formula(size, needs, profile)
    elif size == 0:
        formula = "nothing to hold"
    else:
        formula = why if pool.count == 1 else f"{why}, for each of {pool.count} processes"
        if size == pool.floor:
            formula = f"{_FLOOR[pool.name]}, the least that works"
    items, unit = _count(pool.name, place, size, needs)
    return Line(
        name=pool.name,
        place=place,
        bytes=size * pool.count,
        each_bytes=size,
        count=pool.count,
        source=source,
        formula=formula,
        is_cache=True,
        num_items=items,
        unit=unit,
    )


_FLOOR = {
    "processor": "one largest item",
    "ipc": "one largest item",
    "encoderHost": "off",
    "kv": "one request of maxModelLen",
}


def _encoder_formula(size: int, needs: Needs, profile: ModelProfile) -> str:
    if size == 0:
        return "nothing to hold"
    embeds = size // needs.bytes_per_embed
    return (
        f"max(largest item, batch) = {embeds} embeds x {profile.embed_width} wide x "
        f"{profile.embed_bytes} B x {profile.embed_levels} levels"
    )


def _count(name: str, place: Place, size: int, needs: Needs) -> tuple[int, str]:
    if name in ("encoder", "encoderHost") and needs.bytes_per_embed:
        return size // needs.bytes_per_embed, "embeds"
    if name == "kv":
        ranks = needs.num_ranks if place == "device" else 1  # a rank holds a part of every token
        return size * ranks // max(1, needs.kv_block_bytes), "blocks"
    largest = max((item.processed_bytes for item in needs.items.values()), default=0)
    if name in ("processor", "ipc") and largest:
        return size // largest, "largest items"
    return 0, ""
