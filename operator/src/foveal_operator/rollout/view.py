"""Input and output of a rollout decision: the structs between the reconciler and the rules.

Made by the reconciler, read by the rollout package. No behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from foveal_operator.api.parse import InferenceSpec
from foveal_operator.kube.types import Obj

Body = dict[str, Any]


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over one resource; objects are raw, absent ones None or empty.

    Attributes:
        stateful_set, deployment: as wanted by manifests.desired; None while no pods are asked for.
        record: the live ConfigMap `record_name(name)`, the rollout's only memory.
        engine_pods, frontend_pods: every pod of the role that is not finished, draining ones too.
        free_devices: devices of the engines' kind that no pod has asked for; None = not known.
        awaiting: pods for which there is no node yet; the deadline does not run meanwhile, unless
            there is a good revision to go back to.
        sessions: engine pod -> frontends that have a session with it, of pods that answered.
        load: engine pod -> requests in it, of pods that answered; the idle go first.
        announced: `status.rolloutStrategy` as stored: an outage is announced before it begins.
        now: seconds since the epoch.
    """

    inference: InferenceSpec
    stateful_set: Obj | None
    deployment: Obj | None
    live_stateful_set: Obj | None = None
    live_deployment: Obj | None = None
    record: Obj | None = None
    engine_pods: tuple[Obj, ...] = ()
    frontend_pods: tuple[Obj, ...] = ()
    free_devices: int | None = None
    awaiting: frozenset[str] = frozenset()
    sessions: Mapping[str, int] = {}
    load: Mapping[str, int] = {}
    announced: str = ""
    now: float


class RolloutDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, in this order: record, stateful_set, deployment, delete_pods.

    Attributes:
        record: the ConfigMap to apply; None = as it is.
        stateful_set, deployment: bodies for server-side apply; None = leave the live one alone.
            A body with metadata.resourceVersion is refused (409) when the live one has changed;
            decide again then.
        delete_pods: (name, uid) of engine pods to delete with that uid as precondition.
        strategy: for status.rolloutStrategy: what was chosen and why; the outage, if there is one.
        message: where the rollout stands; "" when there is none.
        in_progress: some pod or template is not of the revision that is asked for.
        keep_config_maps: ConfigMaps that pods or the last good revision refer to; never pruned.
        next_check_seconds: decide again after so long even if nothing changes; None = no need.
    """

    record: Body | None = None
    stateful_set: Body | None = None
    deployment: Body | None = None
    delete_pods: tuple[tuple[str, str], ...] = ()
    strategy: str = ""
    message: str = ""
    in_progress: bool = False
    deadline_exceeded: bool = False
    rolled_back: bool = False
    keep_config_maps: frozenset[str] = frozenset()
    next_check_seconds: float | None = None


def record_name(name: str) -> str:
    """The ConfigMap that remembers a resource's last good revision and its present rollout."""
    return f"{name}-rollout"
