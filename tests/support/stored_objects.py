"""The objects that the API server holds on the way from a model's uri to its profile."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from foveal_operator.api.parse import InferenceSpec, parse
from foveal_operator.kube.types import Obj
from foveal_operator.model.flow import (
    ModelDecision,
    ModelView,
    decide_model,
    model_keys,
)
from tests.support.budget_samples import VLM
from tests.support.regenerate import FACTS
from tests.support.samples import resource

NOW = 1_800_000_000.0
FETCHED = parse(resource())
CLAIMED = parse(resource(model={"uri": "pvc://weights/qwen"}))
PROFILE = msgspec.json.encode(VLM).decode()


def time(ago: float) -> str:
    return datetime.fromtimestamp(NOW - ago, UTC).isoformat().replace("+00:00", "Z")


class StoredObjects:
    """What the API server holds, for one resource."""

    def __init__(self, inference: InferenceSpec) -> None:
        self.inference = inference
        self.live: dict[tuple[str, str], Obj] = {}
        self.pods: list[Obj] = []
        self.downloads: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.waits: dict[str, str] = {}
        self.names = {}
        for kind, name in model_keys(inference, FACTS):
            what = "fetch" if "-fetch-" in name else "profile"
            if kind == "ConfigMap" and what == "fetch":
                what = kind = "record"
            self.names[kind if kind != "Job" else what] = name

    def decide(self) -> ModelDecision:
        view = ModelView(
            inference=self.inference,
            facts=FACTS,
            live=self.live,
            job_pods=tuple(self.pods),
            downloads=self.downloads,
            refused=self.refused,
            waits=self.waits,
            now=NOW,
        )
        found = decide_model(view)
        assert found == decide_model(view)
        return found

    def claim(self, phase: str = "Bound", uid: str = "", ago: float = 9e3) -> StoredObjects:
        name = self.names["PersistentVolumeClaim"]
        metadata = {"uid": uid, "creationTimestamp": time(ago)}
        self.live["PersistentVolumeClaim", name] = {
            "metadata": metadata,
            "status": {"phase": phase},
        }
        return self

    def keep(self, found: ModelDecision) -> StoredObjects:
        """What a pass applies is there in the next one; Jobs are made by `job`."""
        for owned in found.objects:
            kind, _, name = owned.key
            if kind == "ConfigMap":
                self.live[kind, name] = owned.body
        return self

    def without_jobs(self) -> StoredObjects:
        """The cluster has deleted what had ended, with its pods."""
        self.live = {key: body for key, body in self.live.items() if key[0] != "Job"}
        self.pods = []
        return self

    def job(self, what: str, condition: str = "", ago: float = 0.0) -> StoredObjects:
        conditions = (
            [{"type": condition, "status": "True", "lastTransitionTime": time(ago)}]
            if condition
            else []
        )
        self.live["Job", self.names[what]] = {
            "metadata": {"name": self.names[what], "uid": f"uid-{what}"},
            "status": {"conditions": conditions},
        }
        return self

    def pod(self, what: str, state: Obj, conditions: Any = (), ago: float = 0.0) -> StoredObjects:
        self.pods.append(
            {
                "metadata": {
                    "name": f"{self.names[what]}-{len(self.pods)}",
                    "creationTimestamp": time(ago),
                    "labels": {"batch.kubernetes.io/job-name": self.names[what]},
                },
                "status": {
                    "conditions": list(conditions),
                    "containerStatuses": [{"name": what, "state": state}],
                },
            }
        )
        return self

    def ended(self, what: str, code: int, message: str, ago: float = 0.0) -> StoredObjects:
        state = {"exitCode": code, "message": message, "finishedAt": time(ago)}
        return self.pod(what, {"terminated": state}, ago=ago)


def kinds(found: ModelDecision) -> list[str]:
    return [owned.body["kind"] for owned in found.objects]
