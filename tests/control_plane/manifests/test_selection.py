"""What a resource's queries and selectors choose: its own pods, whatever its neighbours' names."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from foveal_operator.cli.dashboard.promql.evaluate import ask
from foveal_operator.cli.dashboard.promql.samples import Store, labels_of
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.monitoring import TARGET_LABELS
from foveal_runtime.plan.metrics import METRICS
from tests.support.regenerate import wanted
from tests.support.samples import LEGAL, put

NAMES = st.from_regex(r"[a-b](-?[a-b]|-engine|-frontend){0,3}", fullmatch=True)
METRIC_CHOICES = (
    *(("frontend", metric) for metric in ("PreprocessQueue", "Concurrency")),
    *(("engine", metric) for metric in ("RunningRequests", "KVUsage")),
)
COUNT = 40.0


def scaled(name: str, role: str, metric: str) -> Obj:
    obj = put(
        put(LEGAL["scaled"], "metadata.name", name), f"spec.{role}.autoscaling.metric", metric
    )
    return put(obj, f"spec.{role}.autoscaling.target", 1)


def pods(obj: Obj) -> list[tuple[str, dict[str, str]]]:
    """One pod of each role as controllers name it: (name, labels)."""
    found = []
    for kind, suffix in (("Deployment", "7d4b9c9f6-x2x2x"), ("StatefulSet", "0")):
        (body,) = wanted(obj).of_kind(kind)
        name = f"{body['metadata']['name']}-{suffix}"
        found.append((name, body["spec"]["template"]["metadata"]["labels"]))
    return found


def scraped(objects: list[Obj], per_pod: dict[str, float]) -> Store:
    """Every family of every pod over a minute, labelled as the PodMonitor says: gauges stand at
    what `per_pod` says of their resource, sums grow by so much a second."""
    store = Store()
    for now in (0.0, 15.0, 30.0, 45.0, 60.0):
        samples = []
        for obj in objects:
            value = per_pod[obj["metadata"]["name"]]
            for pod, labels in pods(obj):
                target = {"namespace": "models", "pod": pod}
                target |= {key: labels[label] for key, label in TARGET_LABELS.items()}
                for family in METRICS:
                    if target["role"] in family.roles:
                        name = family.name + "_sum" * (family.kind == "histogram")
                        is_gauge = family.kind == "gauge"
                        sample = value if is_gauge else value * now
                        samples.append((name, labels_of(target), sample))
        store.add(now, samples)
    return store


@pytest.mark.parametrize(("role", "metric"), METRIC_CHOICES)
@settings(deadline=None, max_examples=15)
@given(name=NAMES, other=NAMES)
@example(name="a", other="a-engine")
@example(name="a", other="a-frontend")
@example(name="a", other="a-b")
def test_an_autoscaler_counts_its_own_pods_alone(
    role: str, metric: str, name: str, other: str
) -> None:
    """`{name}-engine-.+` took the pods of the resource `{name}-engine`."""
    assume(name != other)
    objects = [scaled(name, role, metric), scaled(other, role, metric)]
    store = scraped(objects, {name: 1.0, other: COUNT})
    (scaler,) = (
        body
        for body in wanted(objects[0]).of_kind("ScaledObject")
        if body["metadata"]["name"] == f"{name}-{role}"
    )
    query = scaler["spec"]["triggers"][0]["metadata"]["query"]
    (line,) = ask(store, query, [60.0])
    assert line.points[-1][1] == pytest.approx(100.0 if metric == "KVUsage" else 1.0)


@settings(deadline=None, max_examples=15)
@given(name=NAMES, other=NAMES)
@example(name="a", other="a-engine")
def test_no_selector_takes_a_neighbours_pods(name: str, other: str) -> None:
    """Services, workloads, budgets, policies, monitors and pools, all of a resource's objects."""
    assume(name != other)
    mine = put(LEGAL["scaled"], "metadata.name", name)
    strangers = [labels for _, labels in pods(put(mine, "metadata.name", other))]
    chosen = []
    for owned in wanted(mine).objects:
        spec = owned.body.get("spec", {})
        for key in ("selector", "podSelector"):
            found = spec.get(key) if isinstance(spec, dict) else None
            if found and owned.body["kind"] != "PersistentVolumeClaim":
                chosen.append(found.get("matchLabels", found))
    assert len(chosen) >= 8
    for labels in strangers:
        assert not [one for one in chosen if one.items() <= labels.items()]


def test_a_pod_that_is_not_ready_can_always_be_evicted() -> None:
    """With the default policy a pod that crashes for ever kept its node from being drained."""
    for budget in wanted(LEGAL["gpu"]).of_kind("PodDisruptionBudget"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
