"""Input and output of the budget planner: inputs, lines, problems, edits, the plan.

Filled by the operator's spec and by the CLI, computed by planner.py, read by the manifests, the
status and everything that prints. Plain frozen data; sizes are bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from foveal_runtime.plan.config import GIB, MIB, ModalitiesConfig

Source = Literal["Derived", "Pinned", "Measured", "Shrunk"]
Place = Literal["frontend", "engine", "device"]
"""Where bytes lie: a frontend pod, an engine pod's host memory, one device of an engine."""

FRONTEND_PROCESS_BYTES = 128 * MIB
"""One HTTP process, where the profile has not measured it: 71 MiB with a small tokenizer."""
FRONTEND_BOOKS = {
    "uuids": (16_384, 270),
    "data_urls": (16_384, 350),  # digests of their texts
    "routes": (16_384, 170),  # engines that took a prompt's beginning or an item
    "documents": (8_192, 370),  # digests of their pages
    "tokens": (16_384, 150),  # bytes of each
    "grammars": (5_120, 1_024),  # KiB of compiled ones
    "ghosts": (4 * 4_096, 180),  # keys by which other cache sizes are judged
    "quarantine": (1_024, 300),
    "deaths": (256, 8_192),  # of engines, with 128 suspects each
}
"""What a frontend process remembers besides its caches: entries at most, and bytes of each with
the tables that hold them. tests/data_plane/plan/test_books.py fills them; the metric
`foveal_book_entries` says how full they are."""
ENGINE_BOOKS = {
    "uuids": (16_384, 270),
    "departed": (8_192, 170),  # values that left the store
    "evicted": (8_192, 170),  # encoder outputs
    "ghosts": (3 * 4 * 4_096, 180),
    "events": (11_264, 1_024),  # KiB of cache events for readers
    "quarantine": (1_024, 300),
}
FRONTEND_SERVING_BYTES = 36 * MIB
"""What it takes besides once requests come: its books at their bounds, sockets, threads, free
memory between blocks in use."""
MEDIA_WORKER_BYTES = 512 * MIB
"""One media worker, where the profile has not measured it: 450 MiB with torch and a processor."""
ENGINE_BASE_GPU_BYTES = 3 * GIB
ENGINE_BASE_CPU_BYTES = 640 * MIB
"""An engine process on a CPU, where the profile has not measured it: 456 MiB with torch and its
kernels' caches, which take some 70 MiB more when they are full."""
ENGINE_SERVING_BYTES = 48 * MIB
"""What it takes besides once requests come: its books at their bounds, sockets, threads."""
GRAMMAR_TOKEN_BYTES = 1200
"""Of a vocabulary as the grammar library keeps it, for each token: 1,150 measured."""
GRAMMAR_CACHE_BYTES = 64 * MIB
"""Compiled grammars that a rank keeps, at most; the least recently used goes first."""
GRAMMAR_REQUEST_BYTES = MIB // 2
"""A running request's own state of its grammar: 0.4 MiB measured at the end of its output."""
DEVICE_BASE_BYTES = 768 * MIB
"""CUDA context, libraries' workspaces and communication buffers of one rank."""
DEVICE_TOLERANCE_PERCENT = 5
"""What accelerator.memory may exceed the devices of the nodes by."""
LOAD_STAGING_MAX_BYTES = 2 * GIB
MIRROR_BYTES_PER_KEY = 400
"""Measured in CPython: 0.3 KB a key, 0.4 KB with its metadata."""
MIRROR_UUIDS_BYTES = 16_384 * 220
"""The uuids that an engine holds, as a frontend knows them; counted for each engine."""
MIRROR_ITEM_BYTES = 64 * 1024
"""Mirrors are planned for items of this size: smaller ones mean more keys than planned."""
MIRROR_MIN_ENGINES = 4
"""Mirrors are planned for the next power of two of the engines, and at least this many, so that
adding an engine seldom changes a frontend pod."""
DEFAULT_PROCESSOR_BYTES = 4 * GIB
DEFAULT_IPC_BYTES = 4 * GIB
DEFAULT_KV_CPU_BYTES = 4 * GIB
IPC_STAGING_MIN_BYTES = 16 * MIB
SHM_BYTES = 4 * MIB
"""/dev/shm of a pod: nothing of ours lies there unless several ranks share an engine."""
RANK_SHM_BYTES = 256 * MIB


class FrontendInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One frontend pod. `None` is Auto; a `None` limit follows from the sizes.

    Attributes:
        limit_bytes: memory limit of the pod.
        processor_bytes: processor cache of each process.
        max_media_bytes: request bodies and fetched media that one process admits at a time.
        max_body_bytes: the largest body.
        shm_bytes: shared-memory values this pod may have on a shared local volume; 0 = inline.
    """

    processes: int = 1
    media_workers: int = 2
    limit_bytes: int | None = None
    processor_bytes: int | None = None
    max_media_bytes: int = 512 * MIB
    max_body_bytes: int = 128 * MIB
    shm_bytes: int = 0


class EngineInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One engine pod and its devices. `None` is Auto.

    Attributes:
        num_engines: the most engines there can be (autoscaling's maximum).
        limit_bytes: memory limit of the pod.
        num_devices: devices of one engine, all used by tensor parallelism; 1 on a CPU.
        devices_field: which field of the resource tells their number.
        device_bytes: memory of one device; 0 = unknown.
        found_device_bytes: the most that the nodes allow it to be; 0 = they do not tell.
        max_model_len: 0 = the model's own limit.
        max_num_encoder_input_tokens, encoder_embeds: count embeddings; 0 = derived.
        kv_bytes: KV pool of the engine over all its devices. kv_dtype: see EngineCaches.
        prefix_caching: prefixes are reused, for which models with recurrent state need snapshots.
        lora_bytes: LoRA adapters on the device, all together; 0 = none.
        generates: requests may ask for structured output; False for a model that embeds alone.
    """

    num_engines: int = 1
    limit_bytes: int | None = None
    device: Literal["gpu", "cpu"] = "gpu"
    num_devices: int = 1
    devices_field: str = "engine.accelerator.count"
    device_bytes: int = 0
    found_device_bytes: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_num_encoder_input_tokens: int = 0
    disable_chunked_mm_input: bool = False
    block_size: int = 16
    ipc_bytes: int | None = None
    encoder_bytes: int | None = None
    encoder_embeds: int = 0
    encoder_host_bytes: int | None = 0
    kv_bytes: int | None = None
    kv_dtype: str = "auto"
    prefix_caching: bool = True
    lora_bytes: int = 0
    generates: bool = True


def compiled_grammar_bytes(text: str) -> int:
    """What a compiled grammar takes: 62 times its text for 100 properties, 21 times for an enum of
    1,000 were measured, and next to nothing for small ones."""
    return 4096 + 64 * len(text)


class BudgetInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the budgets follow from, besides the model's profile.

    Attributes:
        headroom_percent: share of each limit that stays free.
        on_misfit: Block = no plan that runs; Shrink = reduce sizes in the documented order.
        node_bytes: allocatable memory of the largest node a pod could run on; 0 = unknown.
    """

    frontend: FrontendInputs = FrontendInputs()
    engine: EngineInputs = EngineInputs()
    modalities: ModalitiesConfig = ModalitiesConfig()
    headroom_percent: int = 10
    on_misfit: Literal["Block", "Shrink"] = "Block"
    node_bytes: int = 0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One term of one limit.

    Attributes:
        bytes: of the whole pod, or of one device; `count` parts of `each_bytes`.
        num_items, unit: the same in embeds, tokens or keys; 0 and "" where it has none.
        formula: how the figure came about, in words.
        is_cache: True for what a user may size; False for what the software needs.
    """

    name: str
    place: Place
    bytes: int
    each_bytes: int
    count: int = 1
    source: Source = "Derived"
    formula: str
    is_cache: bool = False
    num_items: int = 0
    unit: str = ""


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one field of the resource that removes a problem. `field` is below spec."""

    field: str
    before: str
    after: str
    note: str = ""

    def __str__(self) -> str:
        text = f"set spec.{self.field} to {self.after}"
        return f"{text} ({self.note})" if self.note else text


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a plan cannot run: the term, its figures, and the smallest edits that remove it.

    Attributes:
        reason: CamelCase constant, also the condition's reason detail.
        needed, available, unit: bytes, tokens or embeds.
        edits: single edits, each of which removes the problem.
        together: edits that make the resource fit when all of them are made, where no single one
            does.
    """

    reason: str
    place: Place
    term: str
    needed: int
    available: int
    unit: str
    detail: str
    edits: tuple[Edit, ...] = ()
    together: tuple[Edit, ...] = ()

    @property
    def message(self) -> str:
        text = f"{self.detail}."
        if self.together:
            *first, last = (str(edit) for edit in self.together)
            both = f"{', '.join(first)} and {last}" if first else last
            text += f" This configuration fits: {both}."
        if self.edits:
            hints = "; or ".join(str(edit) for edit in self.edits)
            what = "Options" if len(self.edits) > 1 else "To fix it"
            text += f" {'Otherwise' if self.together else what}: {hints}."
        return text


class PlaceBudget(msgspec.Struct, frozen=True, kw_only=True):
    """All terms of one limit. `used_bytes + headroom_bytes <= limit_bytes` when the plan fits.

    Attributes:
        limit_bytes: of the pod or the device; 0 = unknown device.
        source: Pinned when the user gave it, Derived when it follows.
    """

    place: Place
    limit_bytes: int
    headroom_bytes: int
    source: Source
    lines: tuple[Line, ...]

    @property
    def used_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    def line(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)


class BudgetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every byte of one frontend pod, one engine pod and one device, and what may not run.

    The figures below `problems` go into the start-up documents as they are, but for `kv_tokens` and
    `kv_window_bytes`: what requests can have in kv_bytes, and the part of it that is the pool of
    layers with a window. An engine divides kv_bytes itself, by the same function.
    """

    frontend: PlaceBudget
    engine: PlaceBudget
    device: PlaceBudget | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    processor_bytes: int
    frontend_shm_bytes: int
    ipc_bytes: int
    ipc_staging_bytes: int
    engine_shm_bytes: int
    encoder_compute_embeds: int
    encoder_embeds: int
    encoder_host_bytes: int
    kv_bytes: int
    kv_tokens: int
    kv_window_bytes: int
    snapshot_bytes: int
    max_model_len: int

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def shrunk(self) -> tuple[str, ...]:
        """Caches that onMisfit Shrink reduced: "engine ipc: pinned 4.00 GiB, reduced to fit"."""
        return tuple(
            f"{place.place} {line.name}: {line.formula}"
            for place in self.places
            for line in place.lines
            if line.source == "Shrunk"
        )

    @property
    def places(self) -> tuple[PlaceBudget, ...]:
        both = (self.frontend, self.engine)
        return both if self.device is None else (*both, self.device)
