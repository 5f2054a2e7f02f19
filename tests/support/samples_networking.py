"""Samples of networking, queues and sizes: what samples.py lists besides."""

from __future__ import annotations

from typing import Any

ROUTED: dict[str, Any] = {
    "model": {"uri": "pvc://models/tiny", "name": "tiny"},
    "engine": {"accelerator": {"type": "CPU"}, "hostMemory": "6Gi", "queueName": "team-a"},
    "frontend": {"hostMemory": "4Gi"},
    "caches": {"processor": {"size": "256Mi"}, "ipc": {"size": "0"}},
    "networking": {
        "service": {
            "type": "LoadBalancer",
            "annotations": {"service.kubernetes.io/topology-mode": "Auto"},
        },
        "httpRoute": {
            "parentRefs": [{"name": "gateway"}],
            "hostnames": ["*.example.org", "models.example.com"],
            "matches": [
                {"path": "/tiny", "stripPath": True},
                {"path": "/v1", "headers": [{"name": "x-model", "value": "tiny"}]},
            ],
            "weight": 90,
            "splits": [{"name": "tiny-next", "weight": 10}],
        },
    },
}
ILLEGAL_NETWORKING: list[tuple[str, str, Any, str]] = [
    *(
        (
            f"host name {name}",
            "spec.networking.httpRoute",
            {"parentRefs": [{"name": "gw"}], "hostnames": [name]},
            "httpRoute.hostnames",
        )
        for name in (".example.org", "*", "a.*.org", "*.", "a..b", "Example.org", "a.org:80")
    ),
    *(
        (
            f"match {match}",
            "spec.networking.httpRoute",
            {"parentRefs": [{"name": "gw"}], "matches": [match]},
            "httpRoute.matches",
        )
        for match in (
            {"path": "v1"},
            {"path": "/a//b"},
            {"path": "/a?b"},
            {"path": "/a b"},
            {"path": "/a/../b"},
            {"path": "/%2f"},
            {"path": "/" + "a" * 900 + " "},
            {"headers": [{"name": "x y", "value": "v"}]},
            {"headers": [{"name": "x", "value": ""}]},
        )
    ),
    *(
        (
            f"split {split}",
            "spec.networking.httpRoute",
            {"parentRefs": [{"name": "gw"}], "splits": [split]},
            "httpRoute.splits",
        )
        for split in (
            {"name": "b"},
            {"name": "b", "weight": -1},
            {"name": "b", "weight": 1_000_001},
            {"name": "b", "weight": 1, "port": 0},
        )
    ),
    ("service type", "spec.networking.service", {"type": "ExternalName"}, "service.type"),
    (
        "annotation of ours",
        "spec.networking.service",
        {"annotations": {"foveal.dev/adopt": "qwen"}},
        "service.annotations",
    ),
    (
        "annotation without a name",
        "spec.networking.service",
        {"annotations": {"": "x"}},
        "service.annotations",
    ),
    ("queue name", "spec.engine.queueName", "Team A", "spec.engine.queueName"),
    ("queue name as a label", "spec.engine.queueName", "a" * 64, "spec.engine.queueName"),
]
ILLEGAL_SIZES: list[tuple[str, str, Any, str]] = [
    *(
        (f"size {size}", path, size, path)
        for path in (
            "spec.engine.hostMemory",
            "spec.caches.kv.size",
            "spec.engine.accelerator.memory",
            "spec.modalities.image.maxSize",
            "spec.frontend.admission.maxBody",
            "spec.engine.cpu",
        )
        for size in ("1e400", "9E", "0.0000001")
    ),
]
