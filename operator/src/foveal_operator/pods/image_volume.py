"""Digest of an oci:// model: from its uri, or from what kubelets report. Pure.

Called by reconcile/report.py. A kubelet reports the digest of a volume's image only with the
feature gate ImageVolumeWithDigest (alpha and off in Kubernetes 1.37); nothing else in a pod tells
it, and a registry is never asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.model_source import VOLUME

MAX_CHARACTERS = 253


def image_revision(uri: str, pods: Iterable[Obj]) -> tuple[str, str]:
    """(digest, what is to be said of it). ("", "") for a model that is no image."""
    if not uri.startswith("oci://"):
        return "", ""
    image, _, pinned = uri.removeprefix("oci://").partition("@")
    if pinned:
        return pinned[:MAX_CHARACTERS], ""
    reported = _reported(pods)
    if len(reported) == 1:
        return reported[0], ""
    if reported:
        text = f"pods have different images under {image}: {', '.join(reported)}"
        return "", f"{text}. Pin one: oci://{image}@{reported[-1]}"
    return "", (
        f"no node reports which digest {image} is (kubelets do with the feature gate "
        f"ImageVolumeWithDigest); pinned as oci://{image}@sha256:... it is known"
    )


def _reported(pods: Iterable[Obj]) -> list[str]:
    found = {
        mount.get("volumeStatus", {}).get("image", {}).get("imageRef", "")
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses") or ()
        for mount in container.get("volumeMounts") or ()
        if mount.get("name") == VOLUME
    }
    return sorted(ref.rpartition("@")[2][:MAX_CHARACTERS] for ref in found if ref)
