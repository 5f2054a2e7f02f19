"""Pods that answer probes with texts, a clock set by hand, and a record of who was asked."""

from __future__ import annotations

import asyncio

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.pods import SESSION_GROUP_LABEL
from foveal_operator.pods.probes import PodProber
from foveal_runtime.telemetry.metrics import Metrics


def pod(name: str, *, ip: str = "10.0.0.1", group: str = "g", ready: bool = True) -> Obj:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {SESSION_GROUP_LABEL: group}},
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 80}]}]},
        "status": {
            "podIP": ip,
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


def engine_text(sessions: int = 2, stale: int = 0, peak: int = 5) -> str:
    metrics = Metrics("engine", model_name="m", process="e-0", engine="e-0")
    metrics.set("foveal_mirror_sessions", sessions)
    metrics.set("vllm:num_requests_running", 3)
    metrics.set("vllm:num_requests_waiting", 4)
    metrics.set("foveal_mirror_needs", stale, why="stale")
    metrics.set("foveal_mirror_needs", 99, why="pull")
    metrics.set("foveal_memory_peak_bytes", peak)
    metrics.set("foveal_budget_bytes", 7, part="kv", source="measured")
    metrics.set("foveal_budget_bytes", 8, part="kv", source="planned")
    return metrics.exposition().decode()


def frontend_text(*engines_ready: int, queries: int = 0) -> str:
    text = ""
    for number, ready in enumerate(engines_ready):
        metrics = Metrics("frontend", model_name="m", process=f"f-0/{number}")
        metrics.set("foveal_engines_ready", ready)
        metrics.set("foveal_mirror_queries", queries, engine="e-0")
        lines = metrics.exposition().decode().splitlines()
        text += "\n".join(line for line in lines if not text or not line.startswith("#")) + "\n"
    return text


class FakePods:
    """The seam's fake: texts by address, a clock by hand, and who asked how often."""

    def __init__(self, **texts: str) -> None:
        self.texts = texts
        self.asked: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.now = 0.0
        self.prober = PodProber(self.fetch, clock=lambda: self.now, max_in_flight=2)

    async def fetch(self, url: str, timeout_seconds: float) -> str:
        host = url.removeprefix("http://").split(":")[0]
        self.asked.append(host)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            if host not in self.texts:
                raise OSError("connection refused")
            return self.texts[host]
        finally:
            self.in_flight -= 1
