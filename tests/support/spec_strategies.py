"""Generated specs: a legal sample with some of its fields set, replaced or taken away.

Every leaf of the schema takes part, with the values that test_no_field_ignored.py knows; whatever
the schema or its rules refuse is thrown away, as the API server would.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from foveal_operator.kube.types import Obj
from tests.support.api_server_rules import problems
from tests.support.instant_cluster import BAD_IMAGE, NAME
from tests.support.samples import LEGAL, put, resource
from tests.support.spec_fields import BASES, LEAVES, VALUES, sample

MAX_CHANGES = 6
# More than one value where a second one makes another kind of plan.
MORE: dict[str, tuple[Any, ...]] = {
    "spec.engine.replicas": (0, 1, 2, 3),
    "spec.frontend.replicas": (0, 1, 2, 4),
    "spec.frontend.processes": (1, 2),
    "spec.frontend.hostMemory": ("24Gi", "64Gi", "1Gi"),
    "spec.engine.hostMemory": ("64Gi", "96Gi", "1Gi"),
    "spec.caches.ipc.size": ("0", "1Gi", "8Gi"),
    "spec.caches.processor.size": ("0", "256Mi", "2Gi"),
    "spec.caches.encoder.size": ("1Gi", "4Gi", "900Gi"),
    "spec.image": ("registry.example/foveal-runtime:next", "registry.example/r@sha256:00"),
    "spec.rollout.strategy": ("Auto", "Surge", "FreeFirst"),
    "spec.model.uri": ("hf://other/model", "pvc://models/tiny", "hf://a/b"),
    "spec.caches.onMisfit": ("Block", "Shrink"),
    "spec.engine.accelerator.type": ("CPU", "GPU"),
}
# Time stands still for these: another test looks at what they do.
NOT_HERE = {"spec.paused"}
FIELDS = sorted(set(LEAVES) - NOT_HERE)


def values_of(path: str) -> tuple[Any, ...]:
    if path in MORE:
        return MORE[path]
    if path in VALUES:
        return (VALUES[path],)
    return (sample(path, LEAVES[path]),)


def _without(obj: Obj, path: str) -> Obj:
    """A copy without a field."""
    marked = put(obj, path, None)
    at: Any = marked
    *parents, last = path.split(".")
    for key in parents:
        at = at[key]
    del at[last]
    return marked


def _changed(obj: Obj, path: str, value: Any) -> Obj:
    for prefix, parts in BASES.items():
        if path.startswith(prefix):
            for where, company in parts.items():
                obj = put(obj, where, company)
    return put(obj, path, value)


@st.composite
def specs(draw: st.DrawFn) -> Obj:
    """A legal spec. The name of the resource is always the same."""
    obj: Obj = {**draw(st.sampled_from([LEGAL[name] for name in sorted(LEGAL)]))}
    obj["metadata"] = resource(NAME)["metadata"]
    for _ in range(draw(st.integers(0, MAX_CHANGES))):
        path = draw(st.sampled_from(FIELDS))
        if draw(st.integers(0, 4)) == 0:
            changed = _without(obj, path)
        else:
            changed = _changed(obj, path, draw(st.sampled_from(values_of(path))))
        if not problems(changed):
            obj = changed
    return dict(obj["spec"])


def is_allowed(before: Obj, after: Obj) -> bool:
    """Whether the API server lets one follow on the other: some fields of a claim never change."""
    old, new = ({**resource(NAME), "spec": spec} for spec in (before, after))
    return not problems(new, old)


BAD: dict[str, dict[str, Any]] = {
    # Legal, yet it can never serve: it does not fit, or its pods do not come up.
    "no room in the frontend": {"spec.frontend.hostMemory": "300Mi"},
    "no room in the engine": {"spec.engine.hostMemory": "9Gi", "spec.caches.ipc.size": "8Gi"},
    "no such image": {"spec.image": BAD_IMAGE},
    "no such claim": {"spec.model": {"uri": "pvc://nowhere/model"}},
    "a batch too small": {
        "spec.engine.maxNumBatchedTokens": 32,
        "spec.engine.disableChunkedMultiModalInput": True,
    },
}
