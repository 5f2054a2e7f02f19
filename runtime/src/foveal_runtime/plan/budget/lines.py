"""The rows of the budget table: each term's bytes and its formula in words.

Called by planner.py only. A row says how its figure came about, so that a reader can redo it.
"""

from __future__ import annotations

from foveal_runtime.plan.budget.needs import Needs
from foveal_runtime.plan.budget.pools import Pool, Shares
from foveal_runtime.plan.budget.types import (
    DEVICE_BASE_BYTES,
    ENGINE_BASE_CPU_BYTES,
    ENGINE_BASE_GPU_BYTES,
    ENGINE_SERVING_BYTES,
    FRONTEND_PROCESS_BYTES,
    FRONTEND_SERVING_BYTES,
    GRAMMAR_CACHE_BYTES,
    GRAMMAR_REQUEST_BYTES,
    GRAMMAR_TOKEN_BYTES,
    LOAD_STAGING_MAX_BYTES,
    MEDIA_WORKER_BYTES,
    MIRROR_BYTES_PER_KEY,
    MIRROR_ITEM_BYTES,
    MIRROR_UUIDS_BYTES,
    BudgetInputs,
    Line,
    Place,
    Source,
)
from foveal_runtime.plan.lora import TERM_BYTES
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


def frontend_lines(
    inputs: BudgetInputs, needs: Needs, ipc_bytes: int, profile: ModelProfile
) -> tuple[Line, ...]:
    """What a frontend pod needs besides its processor caches."""
    f, taken = inputs.frontend, profile.processes
    keys = ipc_bytes // MIRROR_ITEM_BYTES
    mirror = needs.mirror_engines * (keys * MIRROR_BYTES_PER_KEY + MIRROR_UUIDS_BYTES)
    workers = max(f.media_workers, f.processes)  # each process has one of its own
    admitted = max(f.max_media_bytes, f.max_body_bytes)
    lines = (
        _line(
            "base",
            "frontend",
            (taken.http_bytes or FRONTEND_PROCESS_BYTES) + FRONTEND_SERVING_BYTES,
            f"HTTP process, {_measured(taken.http_bytes)}, + what serving takes",
            # Several are started by one more process, which serves nothing.
            f.processes + (f.processes > 1),
            _source(taken.http_bytes),
        ),
        _line(
            "mediaWorkers",
            "frontend",
            (taken.worker_bytes or MEDIA_WORKER_BYTES) + needs.decode_peak_bytes,
            f"worker process, {_measured(taken.worker_bytes)}, + its largest item at work",
            workers,
            _source(taken.worker_bytes),
        ),
        _line(
            "media",
            "frontend",
            admitted * 7 // 4 + 2 * f.max_body_bytes,
            "request bodies in flight: text and decoded bytes of all admitted media, "
            "plus two copies of the largest body",
            f.processes,
        ),
        _line(
            "values",
            "frontend",
            2 * needs.largest_item_bytes,
            "two processed items in transit for each media worker",
            workers,
        ),
        _line(
            "mirrors",
            "frontend",
            mirror,
            f"{needs.mirror_engines} engines planned x ({keys} keys x {MIRROR_BYTES_PER_KEY} B + "
            f"{format_gib(MIRROR_UUIDS_BYTES)} of uuids)",
            f.processes,
        ),
        _line("shm", "frontend", needs.frontend_shm_bytes, _SHM),
    )
    if f.shm_bytes == 0:
        return lines
    return (*lines, _line("sharedValues", "frontend", f.shm_bytes, "values on the shared volume"))


def engine_lines(inputs: BudgetInputs, needs: Needs, profile: ModelProfile) -> tuple[Line, ...]:
    """What an engine pod's host memory needs besides its caches."""
    cpu = inputs.engine.device == "cpu"
    taken = profile.processes.engine_bytes if cpu else 0
    model = _model_lines("engine", 1, inputs, needs, profile) if cpu else ()
    staging = min(profile.weight_bytes // (4 if cpu else 1), LOAD_STAGING_MAX_BYTES)
    # As it starts, an engine runs its processor on the largest item; steps and values come later.
    idle = needs.ipc_staging_bytes + sum(line.bytes for line in model if line.name != "weights")
    probe = needs.image_work_bytes - idle
    if cpu:
        base = (taken or ENGINE_BASE_CPU_BYTES) + ENGINE_SERVING_BYTES
        what = f"engine process with torch, {_measured(taken)}, + what serving takes"
    else:
        base = ENGINE_BASE_GPU_BYTES * inputs.engine.num_devices
        what = "process of each rank with CUDA"
    lines = (
        _line("base", "engine", base, what, source=_source(taken)),
        _line(
            "loadStaging",
            "engine",
            max(staging, probe if cpu else 0, profile.load_bytes),
            "temporary memory while loading (weight buffer of at most 2 GiB, one largest item)"
            + (
                ", or weights cast or stacked before they are quantised"
                if profile.load_bytes
                else ""
            ),
        ),
        _line(
            "ipcStaging",
            "engine",
            needs.ipc_staging_bytes,
            "items of the largest request, in transit or too large for the cache",
        ),
        _line("shm", "engine", needs.engine_shm_bytes, _SHM),
    )
    return (*lines, *_grammar_lines(inputs, needs, profile), *model)


def _grammar_lines(inputs: BudgetInputs, needs: Needs, profile: ModelProfile) -> tuple[Line, ...]:
    """Of each rank; a profile that does not record the vocabulary changes no plan."""
    if not profile.vocab_size or not inputs.engine.generates:
        return ()
    seqs = inputs.engine.max_num_seqs
    each = GRAMMAR_CACHE_BYTES + seqs * GRAMMAR_REQUEST_BYTES
    each += profile.vocab_size * GRAMMAR_TOKEN_BYTES
    formula = (
        f"structured output: {profile.vocab_size} tokens of the vocabulary, compiled grammars, "
        f"{seqs} requests (maxNumSeqs)"
    )
    return (_line("grammars", "engine", each, formula, needs.num_ranks),)


_SHM = "memory-backed /dev/shm, its size limit"


def _measured(size: int) -> str:
    return "measured with this image and model" if size else "not measured"


def _source(size: int) -> Source:
    return "Measured" if size else "Derived"


def device_lines(inputs: BudgetInputs, needs: Needs, profile: ModelProfile) -> tuple[Line, ...]:
    """What one device needs besides encoder cache and KV."""
    ranks = inputs.engine.num_devices
    base = _line("deviceBase", "device", DEVICE_BASE_BYTES, "CUDA context, workspaces, buffers")
    return (base, *_model_lines("device", ranks, inputs, needs, profile))


def _model_lines(
    place: Place, ranks: int, inputs: BudgetInputs, needs: Needs, profile: ModelProfile
) -> tuple[Line, ...]:
    source: Source = "Measured" if profile.source == "measured" else "Derived"
    tokens = inputs.engine.max_num_batched_tokens
    whole = profile.replicated_weight_bytes or 0
    share = ""
    if ranks > 1:
        share = f" / {ranks} devices"
        if whole:
            share = f", of which {format_gib(whole)} are on each of {ranks} devices"
    weights = whole - (-(profile.weight_bytes - whole) // ranks)
    of = f"decoding {tokens} tokens"
    if needs.items:
        of += f" or encoding the largest {' or '.join(needs.items)}"
    return (
        _line("weights", place, weights, f"all parameters{share}", source=source),
        _line(
            "activations", place, needs.activation_bytes, f"peak of one step, {of}", source=source
        ),
        *_state_lines(place, inputs, profile),
        *_lora_lines(place, inputs),
    )


def _state_lines(place: Place, inputs: BudgetInputs, profile: ModelProfile) -> tuple[Line, ...]:
    if not profile.state_bytes:
        return ()
    count = inputs.engine.max_num_seqs
    formula = f"recurrent state of {count} running requests (maxNumSeqs)"
    return (_line("state", place, count * profile.state_bytes, formula),)


def _lora_lines(place: Place, inputs: BudgetInputs) -> tuple[Line, ...]:
    if not inputs.engine.lora_bytes:
        return ()
    formula = f"LoRA adapters as given, and {TERM_BYTES >> 20} MiB to compute them in"
    num_bytes = inputs.engine.lora_bytes + TERM_BYTES
    return (_line("loras", place, num_bytes, formula, source="Pinned"),)


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
    elif pool.name == "kv" and profile.is_encoder:
        formula = "prompts of two steps (maxNumBatchedTokens): an encoder keeps none"
    elif size == 0:
        formula = "no room: no prefix is reused" if pool.name == "snapshots" else "nothing to hold"
    else:
        formula = why if pool.count == 1 else f"{why}, for each of {pool.count} processes"
        if size == pool.floor:
            formula = f"{_FLOOR[pool.name]}, the minimum that works"
    items, unit = _count(pool.name, place, size, needs)
    if pool.name == "snapshots":
        items, unit = size // pool.granule, "states"
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
    if size == 0 or not needs.bytes_per_embed:
        return "nothing to hold"
    embeds = size // needs.bytes_per_embed
    if embeds == needs.request_embeds:
        rule = "one request's media"
    elif embeds > needs.request_embeds:
        rule = "max(largest item, batch)"
    else:
        rule = f"as memory allows of one request's {needs.request_embeds}"
    return (
        f"{rule} = {embeds} embeds x {profile.embed_width} wide x "
        f"{profile.embed_bytes} B x {profile.embed_levels} levels"
    )


def _count(name: str, place: Place, size: int, needs: Needs) -> tuple[int, str]:
    if name in ("encoder", "encoderHost") and needs.bytes_per_embed:
        return size // needs.bytes_per_embed, "embeds"
    if name == "kv":
        ranks = needs.num_ranks if place == "device" else 1  # a rank holds a part of every token
        return needs.kv.divide(size * ranks).whole if needs.kv.block_bytes else 0, "blocks"
    largest = max((item.processed_bytes for item in needs.items.values()), default=0)
    if name in ("processor", "ipc") and largest:
        return size // largest, "largest items"
    return 0, ""
