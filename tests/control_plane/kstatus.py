"""kstatus in Python: how Flux, Helm's --wait and others read the health of any custom resource.

Written from the rules of fluxcd/cli-utils (pkg/kstatus/status): deletion, observedGeneration, then
Reconciling, Stalled and Ready, in this order. Used by tests only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def verdict(obj: Mapping[str, Any]) -> str:
    """Terminating, InProgress, Failed or Current."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    observed = status.get("observedGeneration")
    if observed is not None and observed != metadata.get("generation"):
        return "InProgress"
    found = {c["type"]: c["status"] for c in status.get("conditions", ())}
    if found.get("Reconciling") == "True":
        return "InProgress"
    if found.get("Stalled") == "True":
        return "Failed"
    return "Current" if found.get("Ready", "True") == "True" else "InProgress"
