"""Claims backed by memory of the node, for values that are shared by processes."""

from __future__ import annotations

from tests.support.node import commands


def make_memory_claim(name: str, size_mib: int) -> None:
    """A tmpfs in the node's own mounts, so that it ends with the node, and a claim to it."""
    folder = commands.ROOT / f"node/{name}"
    folder.mkdir(exist_ok=True)
    commands.run("e2e/cluster/node.sh", "run", "mount", "-t", "tmpfs",
            "-o", f"size={size_mib}m,mode=1777", "tmpfs", str(folder))  # fmt: skip
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": f"{size_mib}Mi"}
    commands.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
         "spec": {**common, "capacity": size, "hostPath": {"path": str(folder)}}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
         "spec": {**common, "volumeName": name, "resources": {"requests": size}}},
    )  # fmt: skip


def forget_claim(name: str) -> None:
    """Without waiting: it goes when the last pod that uses it has gone."""
    for kind in ("persistentvolumeclaim", "persistentvolume"):
        commands.kubectl("delete", f"{kind}/{name}", "--ignore-not-found", "--wait=false")
