"""The generic rules of kstatus, for a custom resource: what Flux and Helm 4 wait by.

Written from the rules of fluxcd/cli-utils, pkg/kstatus/status/generic.go (1.4.0): deletion first,
then the observed generation, then the conditions Reconciling and Stalled, then Ready. A resource
without any of these is current.
"""

from __future__ import annotations

from typing import Any, Literal

Verdict = Literal["Terminating", "InProgress", "Failed", "Current"]


def verdict(obj: dict[str, Any]) -> Verdict:
    metadata, status = obj["metadata"], obj.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    observed = status.get("observedGeneration")
    if observed is not None and observed != metadata.get("generation"):
        return "InProgress"
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    if conditions.get("Ready") in {"False", "Unknown"}:
        return "InProgress"
    return "Current"
