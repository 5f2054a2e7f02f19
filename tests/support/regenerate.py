"""Rewrites what is generated and committed: the CRD and its page, the golden objects, the
dashboards, the chart's generated files, Argo CD's test data.

`make generate` runs it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import yaml

from foveal_operator.api import crd
from foveal_operator.api.parse import InferenceSpec, parse
from foveal_operator.cli.plan.render import desired_yaml
from foveal_operator.kube.kinds import KINDS, Kind
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import ClusterFacts, Desired, access, desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_operator.telemetry.declared import OPERATOR_METRICS
from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.budget.types import BudgetPlan
from foveal_runtime.plan.config import GIB
from foveal_runtime.plan.profile import ModelProfile
from tests.support import api_page, chart_files, grafana
from tests.support.budget_samples import TOY, VLM
from tests.support.metrics_page import rows
from tests.support.samples import LEGAL

ROOT = Path(__file__).parents[2]
CRD_FILE = ROOT / "crds" / "foveal.dev_multimodalinferences.yaml"
OBSERVABILITY = ROOT / "operator/src/foveal_operator/observability"
ARGO = ROOT / "examples/gitops/argocd/resource_customizations/foveal.dev/MultiModalInference"
OPERATOR_METRICS_PAGE = ROOT / "docs" / "reference" / "metrics-operator.md"
API_PAGE = ROOT / "docs" / "reference" / "api.md"
NEVER_TOUCHED_PAGE = ROOT / "docs" / "reference" / "never-touched.md"
GOLDEN = ROOT / "tests/control_plane/golden"
ALL_APIS = frozenset(
    {"HTTPRoute", "InferencePool", "PodMonitor", "PrometheusRule", "ResourceClaimTemplate"}
    | {"ScaledObject"}
)
FACTS = ClusterFacts(
    runtime_image="registry.example/foveal-runtime:test",
    apis=ALL_APIS,
    operator_namespace="foveal-system",
    rule_groups=({"name": "foveal", "rules": [{"alert": "A", "expr": 'up{n="@namespace@"}'}]},),
    dashboards={"foveal-resource.json": '{"uid": "@id@", "title": "@resource@"}\n'},
)


def profile_for(inference: InferenceSpec) -> ModelProfile:
    return TOY if inference.spec.engine.accelerator.type == "CPU" else VLM


def planned(obj: Obj, nodes: NodeFacts | None = None) -> tuple[InferenceSpec, BudgetPlan]:
    """A resource and its plan, on devices of 80 GiB unless the resource says otherwise."""
    inference = parse(obj)
    facts = nodes or NodeFacts(device_bytes=80 * GIB)
    return inference, plan(budget_inputs(inference, facts), profile_for(inference))


def wanted(obj: Obj, facts: ClusterFacts = FACTS) -> Desired:
    inference, result = planned(obj)
    return desired(inference, result, facts)


def golden_text(name: str) -> str:
    return desired_yaml(wanted(LEGAL[name]))


_OPERATOR_HEAD = """# The operator's metrics

Generated from `foveal_operator.telemetry.declared`; do not edit. The operator serves them at
`/metrics`; those of frontends and engines are in [metrics.md](metrics.md).

"""


def operator_metrics_page() -> str:
    return _OPERATOR_HEAD + rows(OPERATOR_METRICS)


_RIGHTS_HEAD = """## Kind by kind

What the roles of the operator allow it (`make generate` writes this part). Whatever is not in the
list it may not even read; within it, the rules above say which objects are a resource's own.

| kind | reads | creates | changes | deletes |
|---|---|---|---|---|
"""
_DOES = {
    "reads": {"get", "list", "watch"}, "creates": {"create"}, "changes": {"patch", "update"},
    "deletes": {"delete"},
}  # fmt: skip


def never_touched_page() -> str:
    """The page as it is, with its last part made of the operator's roles."""
    text = NEVER_TOUCHED_PAGE.read_text(encoding="utf-8")
    before = text.partition(_RIGHTS_HEAD.splitlines()[0])[0]
    rows = (f"| {kind.name} | {' | '.join(_rights(kind))} |\n" for kind in KINDS)
    return before + _RIGHTS_HEAD + "".join(rows)


def _rights(kind: Kind) -> list[str]:
    """A word for each of _DOES."""
    scopes: tuple[access.Scope, ...] = ("resources", "nodes", "lease")
    named = {kind.plural: "yes", f"{kind.plural}/status": "its status"}
    found = {}
    for rule in (rule for scope in scopes for rule in access.rules(scope)):
        for plural in (one for one in rule.resources if one in named and rule.group == kind.group):
            word = "its own" if rule.own_name else named[plural]
            found |= {does: word for does, verbs in _DOES.items() if verbs & set(rule.verbs)}
    return [found.get(does, "–") for does in _DOES]


_HEALTH = ("observedGeneration", "conditions")  # what a health check may read of a status


def argo_files() -> dict[str, str]:
    """Argo CD's test list and its data, in the layout of its repository."""
    from tests.support.argo_health import argo_health
    from tests.support.gitops_states import states

    found, cases = {}, []
    for name, (obj, _, _) in states().items():
        status, message = argo_health(obj)
        path = f"testdata/{name}.yaml"
        cases.append({"healthStatus": {"status": status, "message": message}, "inputPath": path})
        kept = {key: obj["status"][key] for key in _HEALTH if key in obj.get("status", {})}
        shown = {**obj, "status": kept} if kept else obj
        found[path] = yaml.safe_dump(shown, sort_keys=False, width=100)
    found["health_test.yaml"] = yaml.safe_dump({"tests": cases}, sort_keys=False, width=100)
    return found


def argo_config() -> str:
    """The same script as a part of Argo CD's ConfigMap, for who does not wait for a release."""
    script = textwrap.indent((ARGO / "health.lua").read_text(encoding="utf-8"), "    ")
    key = "resource.customizations.health.foveal.dev_MultiModalInference"
    return (
        "# To be merged: kubectl patch configmap argocd-cm -n argocd --patch-file THIS_FILE;\n"
        "# kubectl apply would take away your settings and the label by which Argo CD finds them.\n"
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: argocd-cm\n  namespace: argocd\n"
        f"data:\n  {key}: |\n{script}"
    )


def main() -> None:
    API_PAGE.write_text(api_page.text(), encoding="utf-8")
    from tests.support import restart_table  # which uses this module

    restart_table.PAGE.write_text(restart_table.page(), encoding="utf-8")
    OPERATOR_METRICS_PAGE.write_text(operator_metrics_page(), encoding="utf-8")
    NEVER_TOUCHED_PAGE.write_text(never_touched_page(), encoding="utf-8")
    name, text = grafana.resource_file()
    (OBSERVABILITY / name).write_text(text, encoding="utf-8")
    CRD_FILE.write_text(crd.render(), encoding="utf-8")
    for name, text in chart_files.files().items():
        (chart_files.CHART / name).write_text(text, encoding="utf-8")
    for name, text in argo_files().items():
        (ARGO / name).write_text(text, encoding="utf-8")
    (ARGO.parents[2] / "argocd-cm.yaml").write_text(argo_config(), encoding="utf-8")
    GOLDEN.mkdir(exist_ok=True)
    for name in LEGAL:
        (GOLDEN / f"{name}.yaml").write_text(golden_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
