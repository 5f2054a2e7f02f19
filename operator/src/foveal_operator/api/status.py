"""The status of a MultiModalInference: output only, observed and derived by the operator.

crd.py generates the schema from these structs; status/report.py fills them. Nothing is ever read
back as an input except lastTransitionTime, which a condition keeps until its status flips.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from foveal_operator.api.rules import Part

Short = Annotated[str, Meta(max_length=253)]
Long = Annotated[str, Meta(max_length=4096)]
Time = Annotated[str, Meta(max_length=40, extra_json_schema={"format": "date-time"})]
Count = Annotated[int, Meta(ge=0, le=2_147_483_647)]
Int64 = Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})]


class Condition(Part, frozen=True, kw_only=True):
    """One aspect of the resource."""

    type: Annotated[Annotated[str, Meta(max_length=64)], Meta(description="Name of the aspect.")]
    status: Annotated[Literal["True", "False", "Unknown"], Meta(description="Its state.")]
    reason: Annotated[
        Annotated[str, Meta(max_length=64, pattern="^[A-Z][A-Za-z0-9]*$")],
        Meta(description="Why, as a constant."),
    ]
    message: Annotated[Long, Meta(description="Why, in words, and what to do next.")] = ""
    observed_generation: Annotated[
        Int64, Meta(description="Generation of the spec that it speaks of.")
    ]
    last_transition_time: Annotated[Time, Meta(description="When its status last changed.")]


class RoleStatus(Part, frozen=True, kw_only=True):
    """Pods of one role."""

    workload: Annotated[Short, Meta(description="Deployment or StatefulSet.")] = ""
    desired: Annotated[Count, Meta(description="Pods asked for.")] = 0
    replicas: Annotated[Count, Meta(description="Pods there are.")] = 0
    updated: Annotated[Count, Meta(description="Pods of the current revision.")] = 0
    ready: Annotated[Count, Meta(description="Pods that serve.")] = 0
    available: Annotated[Count, Meta(description="Pods that have served for a while.")] = 0
    draining: Annotated[Count, Meta(description="Pods that finish their streams.")] = 0
    selector: Annotated[
        Short, Meta(description="Labels of the pods, as kubectl -l takes them.")
    ] = ""


class Budget(Part, frozen=True, kw_only=True):
    """One figure of the plan, beside what was measured."""

    bytes: Annotated[Int64, Meta(description="Planned bytes.")]
    display: Annotated[Short, Meta(description="The same in GiB.")]
    measured_bytes: Annotated[Int64 | None, Meta(description="What the pods report.")] = None
    difference_bytes: Annotated[
        # What a double holds: tools that print a schema's bounds as one print these as they are.
        Annotated[int, Meta(ge=-(2**53), le=2**53, extra_json_schema={"format": "int64"})] | None,
        Meta(description="Measured less planned."),
    ] = None
    items: Annotated[Int64 | None, Meta(description="The same in embeddings, blocks or items.")] = (
        None
    )
    source: Annotated[
        Literal["Derived", "Pinned", "Measured", "Shrunk"], Meta(description="Where it is from.")
    ]
    formula: Annotated[
        Annotated[str, Meta(max_length=512)], Meta(description="How it came about, in words.")
    ] = ""


class Failure(Part, frozen=True, kw_only=True):
    """The last container that failed, or was evicted with its pod: of an engine, a frontend, or a
    Job that is not through."""

    pod: Annotated[Short, Meta(description="Its pod.")]
    container: Annotated[Short, Meta(description="Its name.")]
    reason: Annotated[Short, Meta(description="Why, as a constant.")]
    message: Annotated[Long, Meta(description="Its last log line.")] = ""
    exit_code: Annotated[
        Annotated[int, Meta(ge=-1, le=255)], Meta(description="-1 when it never ran.")
    ] = -1
    memory_peak: Annotated[Short, Meta(description="Last self-reported peak of memory.")] = ""
    memory_limit: Annotated[Short, Meta(description="The container's limit beside it.")] = ""
    time: Annotated[Time | None, Meta(description="When.")] = None


class ModelStatus(Part, frozen=True, kw_only=True):
    """The model as resolved."""

    resolved_revision: Annotated[
        Short, Meta(description="Commit or digest, as far as it is known.")
    ] = ""
    download_percent: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | None,
        Meta(description="How much is fetched, while it is and the source tells its size."),
    ] = None
    modalities: Annotated[
        Annotated[tuple[Annotated[str, Meta(max_length=16)], ...], Meta(max_length=8)],
        Meta(description="What it takes besides text."),
    ] = ()


class MultiModalInferenceStatus(Part, frozen=True, kw_only=True):
    """What the operator has seen and derived."""

    observed_generation: Annotated[
        Int64, Meta(description="Generation of the spec that this status speaks of.")
    ] = 0
    conditions: Annotated[
        Annotated[
            tuple[Condition, ...],
            Meta(max_length=16, extra_json_schema={"x-foveal-list-map": "type"}),
        ],
        Meta(
            description="SpecAccepted, BudgetFits, ModelReady, EnginesReady, FrontendsReady, "
            "CachesMirrored, RouteReady, ScalingActive, Available, Ready; Reconciling and Stalled "
            "while true."
        ),
    ] = ()
    url: Annotated[Annotated[str, Meta(max_length=512)], Meta(description="Where it serves.")] = ""
    frontend: Annotated[RoleStatus | None, Meta(description="Frontend pods.")] = None
    engine: Annotated[RoleStatus | None, Meta(description="Engine pods.")] = None
    budgets: Annotated[
        Annotated[dict[Annotated[str, Meta(max_length=32)], Budget], Meta(max_length=16)],
        Meta(
            description="processor (a frontend process), ipc, encoder, encoderHost, kv, snapshots, "
            "weights, shm (an engine), frontendPodMemory, enginePodMemory, deviceMemory (limits)."
        ),
    ] = msgspec.field(default_factory=dict)
    current_revision: Annotated[Short, Meta(description="Engine revision that serves.")] = ""
    update_revision: Annotated[Short, Meta(description="Engine revision asked for.")] = ""
    rendered_config_hash: Annotated[Short, Meta(description="Of the start-up documents.")] = ""
    rendered_config_map: Annotated[Short, Meta(description="Engine ConfigMap in use.")] = ""
    rollout_strategy: Annotated[Short, Meta(description="Chosen strategy, and why.")] = ""
    last_failure: Annotated[Failure | None, Meta(description="Last failed container.")] = None
    model: Annotated[ModelStatus | None, Meta(description="The model as resolved.")] = None
    resolved: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema={"x-foveal-raw": True})],
        Meta(description="The operator's defaults as they were applied."),
    ] = msgspec.field(default_factory=dict)
