"""One request to the API server as the proxy saw it: who, which verb, which object."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

WRITES = frozenset({"create", "apply", "patch", "update", "delete", "deletecollection"})
_APPLY = "application/apply-patch"


@dataclass(frozen=True)
class Target:
    """What a path names; empty where it names nothing."""

    group: str = ""
    resource: str = ""
    namespace: str = ""
    name: str = ""
    sub: str = ""

    def __str__(self) -> str:
        return "/".join(
            part for part in (self.resource, self.namespace, self.name, self.sub) if part
        )


@dataclass(frozen=True)
class Call:
    """`number` counts all calls of a proxy, `write_number` its writes from 1 (0 for a read); `at`
    is when it came, by time.monotonic()."""

    number: int
    write_number: int
    client: str
    verb: str
    target: Target
    query: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)

    @property
    def is_write(self) -> bool:
        """A dry run changes nothing."""
        return self.verb in WRITES and not self.query.get("dryRun")

    @property
    def is_lease(self) -> bool:
        return self.target.resource == "leases"

    def __str__(self) -> str:
        return f"{self.client}: {self.verb} {self.target}"


def parse_path(path: str) -> Target:
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        group, rest = "", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, rest = parts[1], parts[3:]
    else:
        return Target()
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource, name, sub, *_ = [*rest, "", "", ""]
    return Target(group, resource, namespace, name, sub)


def verb_of(method: str, target: Target, query: dict[str, str], content_type: str) -> str:
    if method == "GET":
        if query.get("watch") in ("1", "true", "True"):
            return "watch"
        return "get" if target.name or not target.resource else "list"
    if method == "PATCH":
        return "apply" if content_type.startswith(_APPLY) else "patch"
    if method == "DELETE":
        return "delete" if target.name else "deletecollection"
    return {"POST": "create", "PUT": "update"}.get(method, method.lower())


def parse_body(data: bytes) -> dict[str, Any]:
    """{} for an empty body; apply patches of our clients are JSON, which is YAML."""
    value = json.loads(data) if data else {}
    return value if isinstance(value, dict) else {}
