"""From resource, plan and facts to every object of one MultiModalInference. Pure.

Called by the reconciler, by `foveal plan` and by tests. The builders stand in files by subject;
this file only says which objects there are, and in which order they are applied.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from foveal_operator.api.parse import InferenceSpec
from foveal_operator.kube.kinds import BY_NAME
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import ClusterFacts, Context, Owned
from foveal_operator.manifests.curve_keys import curve_secret
from foveal_operator.manifests.documents import config_map
from foveal_operator.manifests.job import fetch_job, profile_job
from foveal_operator.manifests.model_source import model_claim, model_source
from foveal_operator.manifests.monitoring import (
    dashboard,
    is_wanted,
    pod_monitor,
    prometheus_rule,
)
from foveal_operator.manifests.network import (
    engine_network_policy,
    engine_service,
    frontend_network_policy,
    frontend_service,
    http_route,
    inference_pool,
    model_network_policy,
)
from foveal_operator.manifests.pods import service_account
from foveal_operator.manifests.workloads import (
    engine_autoscaler,
    engine_stateful_set,
    frontend_autoscaler,
    frontend_deployment,
    pod_disruption_budget,
    resource_claim_template,
)
from foveal_runtime.plan.budget.types import BudgetPlan


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What should exist, in the order of application.

    Attributes:
        complete: everything is listed, so owned objects that are not listed may be pruned. False
            while a profile or the model is missing or the budgets do not fit: running pods of an
            earlier spec are then left alone.
        missing_apis: optional APIs that the resource asks for and the cluster does not serve.
    """

    objects: tuple[Owned, ...]
    complete: bool
    missing_apis: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> list[Obj]:
        return [owned.body for owned in self.objects if owned.body["kind"] == kind]


def desired(inference: InferenceSpec, plan: BudgetPlan | None, facts: ClusterFacts) -> Desired:
    """Every object. Raises SpecError when a podTemplate touches what the operator derives."""
    context = Context(inference=inference, plan=plan, facts=facts)
    objects = [*_model_objects(context)]
    if plan is None:
        objects.append(Owned(body=profile_job(context)))
        return Desired(objects=tuple(objects), complete=False)
    serves = plan.fits and facts.model_ready
    missing: list[str] = []
    if serves:
        objects += [Owned(body=body) for body in _access_objects(context)]
        objects.append(Owned(body=curve_secret(context), policy="CreateOnly"))
        for body in (*_workload_objects(context), *_optional_objects(context)):
            kind = body["kind"]
            if kind in facts.apis or not BY_NAME[kind].optional:
                objects.append(Owned(body=body))
            elif kind not in missing:
                missing.append(kind)
    return Desired(objects=tuple(objects), complete=serves, missing_apis=tuple(missing))


def _model_objects(context: Context) -> Iterator[Owned]:
    """What comes before any plan: identity, weights."""
    yield Owned(body=service_account(context))
    if context.inference.spec.security.network_policy == "Enabled":
        yield Owned(body=model_network_policy(context))
    source = model_source(context)
    if source.owns_claim:
        yield Owned(body=model_claim(context), policy="Retain")
    if source.fetched:
        yield Owned(body=fetch_job(context))


def _access_objects(context: Context) -> Iterator[Obj]:
    if context.inference.spec.security.network_policy == "Enabled":
        yield engine_network_policy(context)
        yield frontend_network_policy(context)
    yield engine_service(context)
    yield frontend_service(context)


def _workload_objects(context: Context) -> Iterator[Obj]:
    """Engines first: a new frontend is ready with its first compatible session."""
    spec = context.inference.spec
    yield config_map(context, "engine")
    yield config_map(context, "frontend")
    if spec.engine.accelerator.device_class_name:
        yield resource_claim_template(context, spec.engine.accelerator)
    yield engine_stateful_set(context)
    yield frontend_deployment(context)
    # With one replica a budget would block a node's drain without end.
    if context.inference.num_engines > 1:
        yield pod_disruption_budget(context, "engine")
    if context.inference.num_frontends > 1:
        yield pod_disruption_budget(context, "frontend")
    scaling = spec.frontend.autoscaling
    if scaling and scaling.metric == "CPU":
        yield frontend_autoscaler(context, scaling)


def _optional_objects(context: Context) -> Iterator[Obj]:
    """What pods do without."""
    spec, facts = context.inference.spec, context.facts
    networking, watch = spec.networking, spec.observability
    if spec.frontend.autoscaling and spec.frontend.autoscaling.metric != "CPU":
        yield frontend_autoscaler(context, spec.frontend.autoscaling)
    if spec.engine.autoscaling:
        yield engine_autoscaler(context, spec.engine.autoscaling)
    if networking.inference_pool:
        yield inference_pool(context, networking.inference_pool)
    if networking.http_route:
        yield http_route(context, networking.http_route)
    if is_wanted(watch.pod_monitor, "PodMonitor" in facts.apis):
        yield pod_monitor(context)
    if facts.rule_groups and is_wanted(watch.prometheus_rule, "PrometheusRule" in facts.apis):
        yield prometheus_rule(context)
    if facts.dashboards and is_wanted(watch.dashboard, "PodMonitor" in facts.apis):
        yield dashboard(context)


__all__ = ["ClusterFacts", "Desired", "Owned", "desired"]
