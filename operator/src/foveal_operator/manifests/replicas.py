"""Owner of a workload's spec.replicas: the operator or an autoscaler. Pure.

The reconciler asks before manifests.desired, and fills ClusterFacts with the answers.
"""

from __future__ import annotations

from foveal_operator.kube.types import Obj


def live_replicas(workload: Obj | None) -> int | None:
    """spec.replicas as it stands; None where there is no workload."""
    return None if workload is None else int(workload.get("spec", {}).get("replicas", 1))


def is_handed_over(workload: Obj | None, field_manager: str) -> bool:
    """Somebody other than `field_manager` owns spec.replicas, by metadata.managedFields.

    From then on the operator leaves the field out of what it applies. Until then it applies the
    live value: leaving it out as its only owner would reset the workload to one pod.
    """
    if workload is None:
        return False
    return any(
        entry.get("manager") != field_manager
        and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        for entry in workload["metadata"].get("managedFields", ())
    )
