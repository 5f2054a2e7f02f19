"""What the operator may ask of an API server: the seam between it and the network.

KubeCluster (cluster.py) is the real one, FakeCluster (fake_cluster.py) the one in memory. All
objects are plain mappings as the API server gives them.
"""

from __future__ import annotations

from typing import Any, Protocol

from foveal_operator.kinds import Kind

Obj = dict[str, Any]


class Cluster(Protocol):
    """Every call may raise the errors of api_errors.py. Reads are live, never from a cache."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Obj | None:
        """None when it is not there."""

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Obj]:
        """All objects. Raises NotFound when the cluster lacks the API."""

    async def serves(self, kind: Kind) -> bool:
        """Whether the API is there."""

    async def apply(self, body: Obj) -> Obj:
        """Server-side apply with force. uid or resourceVersion in it are preconditions."""

    async def apply_status(self, body: Obj) -> Obj:
        """The same for the status. Raises NotFound: it never creates."""

    async def create(self, body: Obj) -> Obj | None:
        """None when it is there already."""

    async def update(self, body: Obj) -> Obj:
        """Replaces; Conflict unless its resourceVersion is the present one."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> bool:
        """Only this very object. False when it is gone already."""

    async def close(self) -> None: ...
