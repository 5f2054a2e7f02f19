"""A FakeCluster as the command line reads one."""

from __future__ import annotations

from typing import Any

from foveal_operator.kube.kinds import KINDS
from foveal_operator.kube.reader import ForbiddenError
from foveal_operator.kube.types import Obj
from foveal_operator.testing.fake_cluster import FakeCluster
from foveal_operator.testing.fake_reader import FakeReader


class FakeClusterReader(FakeReader):
    """A FakeCluster as the command line reads one."""

    def __init__(self, cluster: FakeCluster, namespace: str = "default") -> None:
        super().__init__({}, namespace)
        self.cluster = cluster
        self.forbidden: set[str] = set()

    def get(self, path: str, **query: str) -> Obj | None:
        if path == "/apis/apps/v1/deployments":
            return super().get(path, **query)
        for kind in KINDS:
            if path == kind.root and kind.name not in self.cluster.missing:
                served = [k for k in KINDS if k.root == path and k.name not in self.cluster.missing]
                return {"resources": [{"name": k.plural} for k in served]}
            for namespace in (self.namespace, None):
                base = kind.path(namespace)
                if path == base:
                    if kind.name in self.forbidden:
                        raise ForbiddenError(f"{kind.plural} is forbidden")
                    listed = self.cluster.list_all(kind, namespace, query.get("labelSelector", ""))
                    return {"items": _now(listed)}
                if path.startswith(f"{base}/") and path.count("/") == base.count("/") + 1:
                    return _now(self.cluster.get(kind, namespace, path.rpartition("/")[2]))
        return None


def _now(coroutine: Any) -> Any:
    """What it returns: in memory nothing is ever waited for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the fake cluster waited")
