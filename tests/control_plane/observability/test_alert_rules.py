"""Alert rules against Prometheus's own tool: they parse, fire when they should, else are quiet.

Dashboards' expressions are parsed by the same tool. Without `promtool` these tests are skipped and
say so; .ci/run installs it.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from foveal_operator.observability import operator_rule_groups, resource_rule_groups
from foveal_operator.observability.alerts import ALERTS
from foveal_operator.observability.promql import KNOWN
from foveal_runtime.plan.metrics.metric import Metric
from tests.support.observability_files import FILES, PROMTOOL, expressions, promtool

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")

T = 'namespace="models",resource="qwen"'
N = 'namespace="models",name="qwen"'
POD = f'{T},pod="qwen-engine-0"'
CONDITION = f"foveal_inference_condition{{{N},"
IN = 'namespace="foveal-system"'
OP = f'operator="foveal",{IN}'
LEADER = f'leader_election_master_status{{{OP},name="foveal-operator"'
Series = dict[str, str]
SERVES = CONDITION + 'type="Available",status="True"}'
MEANT: Series = {
    f'foveal_inference_pods{{{N},role="frontend",state="desired"}}': "2x60",
    f'foveal_inference_pods{{{N},role="engine",state="desired"}}': "1x60",
    f"foveal_inference_starting{{{N}}}": "0x60",
}
"""Asked for, and not loading for the first time."""
# What runs beside Foveal in any cluster, healthy and busy: kube-controller-manager, kube-scheduler,
# cert-manager (in Foveal's own namespace, too) and a second Foveal that does not work.
OTHERS: Series = {}
for _of, _leads in (
    (
        'namespace="kube-system",pod="kube-controller-manager",name="kube-controller-manager"',
        "1x60",
    ),
    ('namespace="kube-system",pod="kube-scheduler",name="kube-scheduler"', "1x60"),
    (f'{IN},pod="cert-manager",name="cert-manager-controller"', "1x60"),
    ('operator="foveal",namespace="other",pod="b",name="foveal-operator"', "1x60"),
    (f'{OP},pod="c",name="second-foveal-operator"', "1x60"),
):
    OTHERS[f"leader_election_master_status{{{_of}}}"] = _leads
for _of, _name in (
    ('namespace="kube-system",pod="kube-controller-manager"', "deployment"),
    (f'{IN},pod="cert-manager"', "certificates"),
    ('operator="foveal",namespace="other",pod="b"', "multimodalinference"),
):
    OTHERS |= {
        f'workqueue_depth{{{_of},name="{_name}"}}': "7x60",
        f'controller_runtime_reconcile_total{{{_of},controller="{_name}",result="x"}}': "9x60",
        f'controller_runtime_reconcile_errors_total{{{_of},controller="{_name}"}}': "0+60x60",
        f'rest_client_requests_total{{{_of},verb="GET",code="503"}}': "0+50x60",
    }
OTHERS['foveal_operator_watch_is_up{namespace="other",pod="b"}'] = "0x60"
OTHERS['foveal_operator_drift_repairs_total{namespace="other",pod="b",kind="Service"}'] = "0+5x60"
# Busy without errors, so that they do not hide Foveal's own.
OTHERS[f'controller_runtime_reconcile_total{{{IN},pod="d",controller="d",result="success"}}'] = (
    "0+90x60"
)
OTHERS[f'rest_client_requests_total{{{IN},pod="d",verb="GET",code="200"}}'] = "0+900x60"

# name -> (series that make it fire at 60 min, series that do not)
CASES: dict[str, tuple[Series, Series]] = {
    "FovealPodMemoryNearLimit": (
        {f"foveal_memory_limit_bytes{{{POD}}}": "100x60",
         f"foveal_memory_used_bytes{{{POD}}}": "95x60"},
        {f"foveal_memory_limit_bytes{{{POD}}}": "100x60",
         f"foveal_memory_used_bytes{{{POD}}}": "80x60"},
    ),
    "FovealBudgetExceeded": (
        {f'foveal_inference_budget_bytes{{{N},budget="ipc"}}': "100x60",
         f'foveal_inference_measured_bytes{{{N},budget="ipc"}}': "120x60"},
        {f'foveal_inference_budget_bytes{{{N},budget="ipc"}}': "100x60",
         f'foveal_inference_measured_bytes{{{N},budget="ipc"}}': "110x60"},
    ),
    "FovealBudgetMisfit": (
        {CONDITION + 'type="BudgetFits",status="False"}': "1x60"},
        {CONDITION + 'type="BudgetFits",status="False"}': "0x60"},
    ),
    "FovealPodFailing": (
        {f'foveal_inference_pod_failures_total{{{N},reason="OOMKilled"}}': "0+1x60"},
        {f'foveal_inference_pod_failures_total{{{N},reason="OOMKilled"}}': "7x60"},
    ),
    "FovealStaleHints": (
        {f'foveal_mirror_needs_total{{{POD},why="stale"}}': "0+60x60",
         f'foveal_cache_queries_total{{{T},pod="f",cache="ipc"}}': "0+6000x60"},
        {f'foveal_mirror_needs_total{{{POD},why="stale"}}': "0+1x60",
         f'foveal_cache_queries_total{{{T},pod="f",cache="ipc"}}': "0+6000x60"},
    ),
    "FovealHitRatioFell": (
        {f"vllm:mm_cache_queries_total{{{T}}}": "0+60x60",
         f"vllm:mm_cache_hits_total{{{T}}}": "0+50x30 1500x30",
         f"process_start_time_seconds{{{T}}}": "2400x60"},
        {f"vllm:mm_cache_queries_total{{{T}}}": "0+60x60",
         f"vllm:mm_cache_hits_total{{{T}}}": "0+50x60",
         f"process_start_time_seconds{{{T}}}": "2400x60"},
    ),
    "FovealMirrorSessionDown": (
        {CONDITION + 'type="CachesMirrored",status="False"}': "1x60"},
        {CONDITION + 'type="CachesMirrored",status="Unknown"}': "1x60"},
    ),
    "FovealValuesLate": (
        {f'foveal_mirror_waitq_seconds_bucket{{{POD},le="1.0"}}': "0+1x60",
         f'foveal_mirror_waitq_seconds_bucket{{{POD},le="10.0"}}': "0+60x60",
         f'foveal_mirror_waitq_seconds_bucket{{{POD},le="+Inf"}}': "0+60x60"},
        {f'foveal_mirror_waitq_seconds_bucket{{{POD},le="0.5"}}': "0+60x60",
         f'foveal_mirror_waitq_seconds_bucket{{{POD},le="+Inf"}}': "0+60x60"},
    ),
    "FovealEncoderWait": (
        {f'foveal_encoder_wait_seconds_bucket{{{POD},le="1.0"}}': "0+1x60",
         f'foveal_encoder_wait_seconds_bucket{{{POD},le="10.0"}}': "0+60x60",
         f'foveal_encoder_wait_seconds_bucket{{{POD},le="+Inf"}}': "0+60x60"},
        {f'foveal_encoder_wait_seconds_bucket{{{POD},le="0.0001"}}': "0+60x60",
         f'foveal_encoder_wait_seconds_bucket{{{POD},le="+Inf"}}': "0+60x60"},
    ),
    "FovealValueConflict": (
        {f"foveal_mirror_value_conflicts_total{{{POD}}}": "0x30 1x30"},
        {f"foveal_mirror_value_conflicts_total{{{POD}}}": "0x60"},
    ),
    "FovealUnavailable": (
        {CONDITION + 'type="Available",status="False"}': "1x60", **MEANT},
        {CONDITION + 'type="Available",status="False"}': "0x60", **MEANT},
    ),
    "FovealStartOverdue": (
        {f"foveal_inference_starting{{{N}}}": "1x60"},
        {f"foveal_inference_starting{{{N}}}": "0x5 1x54"},
    ),
    "FovealRolloutStalled": (
        {f"foveal_inference_stalled{{{N}}}": "1x60"},
        {f"foveal_inference_stalled{{{N}}}": "0x60"},
    ),
    "FovealErrorRate": (
        # Streams that broke off: each began with a 200.
        {f'http_requests_total{{{T},status="2xx"}}': "0+100x60",
         f'foveal_request_errors_total{{{T},code="engine_error"}}': "0+20x60"},
        {f'http_requests_total{{{T},status="2xx"}}': "0+80x60",
         f'http_requests_total{{{T},status="4xx"}}': "0+20x60",
         f'foveal_request_errors_total{{{T},code="media_invalid"}}': "0+20x60",
         f'foveal_request_errors_total{{{T},code="engine_error"}}': "5x60"},
    ),
    "FovealFrontendsAtMost": (
        {f'foveal_inference_pods{{{N},role="frontend",state="ready"}}': "4x60",
         f'foveal_inference_max_pods{{{N},role="frontend"}}': "4x60",
         f'vllm:admission_rejections_total{{{T},reason="requests"}}': "0+5x60"},
        {f'foveal_inference_pods{{{N},role="frontend",state="ready"}}': "4x60",
         f'foveal_inference_max_pods{{{N},role="frontend"}}': "4x60",
         f'vllm:admission_rejections_total{{{T},reason="requests"}}': "5x60"},
    ),
    "FovealEngineStuck": (
        {f"vllm:num_requests_running{{{POD}}}": "3x60",
         f"foveal_engine_steps_total{{{POD}}}": "9x60"},
        {f"vllm:num_requests_running{{{POD}}}": "3x60",
         f"foveal_engine_steps_total{{{POD}}}": "0+9x60"},
    ),
    "FovealMediaWorkersDying": (
        {f'foveal_media_worker_restarts_total{{{T},pod="f",reason="died"}}': "0+1x60"},
        {f'foveal_media_worker_restarts_total{{{T},pod="f",reason="died"}}': "0x59 1x1"},
    ),
    "FovealMetricsAbsent": (
        {f'foveal_cache_capacity_bytes{{namespace="other",resource="qwen",pod="{0}"}}': "1x60",
         SERVES: "1x60", **MEANT},
        {f"foveal_cache_capacity_bytes{{{POD}}}": "1x60", SERVES: "1x60", **MEANT},
    ),
    "FovealOperatorNoLeader": (
        {f'leader_election_master_status{{{OP},name="foveal-operator"}}': "0x60"},
        {f'leader_election_master_status{{{OP},name="foveal-operator"}}': "1x60"},
    ),
    "FovealOperatorTwoLeaders": (
        {f'leader_election_master_status{{{OP},name="foveal-operator",pod="x"}}': "1x60",
         f'leader_election_master_status{{{OP},name="foveal-operator",pod="y"}}': "1x60"},
        {f'leader_election_master_status{{{OP},name="foveal-operator",pod="x"}}': "1x60",
         f'leader_election_master_status{{{OP},name="foveal-operator",pod="y"}}': "0x60"},
    ),
    "FovealOperatorReconcileErrors": (
        {f'controller_runtime_reconcile_errors_total{{{OP},controller="mmi"}}': "0+60x60"},
        {f'controller_runtime_reconcile_errors_total{{{OP},controller="mmi"}}': "0+1x60"},
    ),
    "FovealOperatorQueueStuck": (
        {f'workqueue_depth{{{OP},pod="x",name="mmi"}}': "2x60",
         f'{LEADER},pod="x"}}': "1x60", f'{LEADER},pod="y"}}': "0x60",
         f'controller_runtime_reconcile_total{{{OP},controller="mmi",result="success"}}': "9x60"},
        {f'workqueue_depth{{{OP},pod="x",name="mmi"}}': "2x60", f'{LEADER},pod="x"}}': "1x60",
         f'controller_runtime_reconcile_total{{{OP},controller="mmi",result="success"}}': "0+9x60"},
    ),
    "FovealOperatorWatchesDown": (
        {f'foveal_operator_watch_is_up{{{IN},pod="x"}}': "0x60"},
        {f'foveal_operator_watch_is_up{{{IN},pod="x"}}': "1x60"},
    ),
    "FovealOperatorApiErrors": (
        {f'rest_client_requests_total{{{OP},verb="GET",code="200"}}': "0+50x60",
         f'rest_client_requests_total{{{OP},verb="GET",code="503"}}': "0+50x60"},
        {f'rest_client_requests_total{{{OP},verb="GET",code="200"}}': "0+50x60",
         f'rest_client_requests_total{{{OP},verb="GET",code="404"}}': "0+50x60"},
    ),
    "FovealDriftFight": (
        {f'foveal_operator_drift_repairs_total{{{IN},kind="Service"}}': "0+5x60"},
        {f'foveal_operator_drift_repairs_total{{{IN},kind="Service"}}': "0x50 1x10"},
    ),
}  # fmt: skip


# What an operator shows of its reconciles before the first has ended.
FROM_ZERO = [
    ("controller_runtime_reconcile", ",".join([OP, *(f'{k}="{v}"' for k, v in labels.items())]))
    for labels in KNOWN["controller_runtime_reconcile"].first_series()
]
# alert -> further series, and whether it fires with them
MORE: list[tuple[str, str, Series, bool]] = [
    ("FovealUnavailable", "is quiet at zero replicas",
     {CONDITION + 'type="Available",status="False"}': "1x60", **MEANT,
      f'foveal_inference_pods{{{N},role="engine",state="desired"}}': "0x60"}, False),
    ("FovealUnavailable", "is quiet while it loads for the first time",
     {CONDITION + 'type="Available",status="False"}': "1x60", **MEANT,
      f"foveal_inference_starting{{{N}}}": "1x60"}, False),
    ("FovealMetricsAbsent", "fires where nobody scrapes the operator",
     {f"foveal_cache_capacity_bytes{{{POD}}}": "1x60"}, True),
    ("FovealMetricsAbsent", "is quiet at zero replicas",
     {SERVES: "0x60", **MEANT,
      f'foveal_inference_pods{{{N},role="engine",state="desired"}}': "0x60"}, False),
    ("FovealFrontendsAtMost", "is quiet while frontends of a rollout drain",
     {f'foveal_inference_pods{{{N},role="frontend",state="ready"}}': "4x60",
      f'foveal_inference_max_pods{{{N},role="frontend"}}': "4x60",
      f'vllm:admission_rejections_total{{{T},reason="draining"}}': "0+5x60"}, False),
    ("FovealOperatorTwoLeaders", "is quiet where two jobs scrape one leader",
     {f'{LEADER},pod="x",job="a"}}': "1x60", f'{LEADER},pod="y",job="a"}}': "0x60",
      f'{LEADER},pod="x",job="b"}}': "1x60", f'{LEADER},pod="y",job="b"}}': "0x60"}, False),
    ("FovealOperatorApiErrors", "fires where there is no answer",
     {f'rest_client_requests_total{{{OP},verb="GET",code="200"}}': "0+50x60",
      f'rest_client_requests_total{{{OP},verb="GET",code="<error>"}}': "0+50x60"}, True),
    ("FovealOperatorQueueStuck", "fires where workers hang from the start",
     {f'workqueue_depth{{{OP},pod="x",name="mmi"}}': "2x60", f'{LEADER},pod="x"}}': "1x60",
      **{f'{name}_total{{{key}}}': "0x60" for name, key in FROM_ZERO}}, True),
    ("FovealOperatorQueueStuck", "is quiet on an idle cluster",
     {f'workqueue_depth{{{OP},pod="x",name="mmi"}}': "0x60", f'{LEADER},pod="x"}}': "1x60",
      f'workqueue_depth{{{OP},pod="y",name="mmi"}}': "5x60", f'{LEADER},pod="y"}}': "0x60",
      f'controller_runtime_reconcile_total{{{OP},controller="mmi",result="success"}}': "9x60"},
     False),
]  # fmt: skip


def rule_groups() -> list[dict[str, Any]]:
    text = yaml.safe_dump([*resource_rule_groups(), *operator_rule_groups()], sort_keys=False)
    text = text.replace("@namespace@", "models").replace("@resource@", "qwen")
    text = text.replace("@installation@", "foveal-system").replace("@lease@", "foveal-operator")
    found: list[dict[str, Any]] = yaml.safe_load(text)
    return found


def _count(name: str) -> str:
    return f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'


def _test(name: str, series: Series, fires: bool, what: str = "") -> dict[str, Any]:
    return {
        "name": f"{name} {what or ('fires' if fires else 'is quiet')}",
        "interval": "1m",
        "input_series": [
            {"series": key, "values": value} for key, value in {**OTHERS, **series}.items()
        ],
        "promql_expr_test": [
            {
                "expr": f"({_count(name)}) > bool 0",
                "eval_time": "60m",
                "exp_samples": [{"value": int(fires)}],
            }
        ],
    }


def test_every_alert_fires_and_every_alert_can_be_quiet(tmp_path: Path) -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": rule_groups()}))
    promtool("check", "rules", str(rules))
    tests = [
        _test(name, series, fires)
        for name, pair in CASES.items()
        for series, fires in zip(pair, (True, False), strict=True)
    ] + [_test(name, series, fires, what) for name, what, series, fires in MORE]
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        yaml.safe_dump(
            {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests},
            width=10_000,
        )
    )
    promtool("test", "rules", str(suite))


def test_runbooks_are_absolute_everywhere() -> None:
    for group in rule_groups():
        for rule in group["rules"]:
            assert re.match(r"https?://[^/]+/.*\.md$", rule["annotations"]["runbook_url"])


def test_every_panel_query_is_valid(tmp_path: Path) -> None:
    """As recording rules, with the dashboards' variables filled in."""
    queries = [expr for where, expr in expressions() if where.split(":")[0] in FILES]
    assert len(queries) > 150
    for name, value in (("$__rate_interval", "1m"), ("$namespace", ".*"), ("$resource", ".*"),
                        ("$pod", ".*"), ("$installation", ".*")):  # fmt: skip
        queries = [query.replace(name, value) for query in queries]
    assert not [query for query in queries if re.search(r"\$[a-zA-Z_]", query)]
    records = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "q", "rules": records}]}, width=10_000))
    promtool("check", "rules", str(file))


# --- every panel shows something ----------------------------------------------------------------
_LABEL_VALUES = {
    "factor": ("0.5", "1", "2", "4"),
    "cache": ("processor", "ipc", "encoder", "kv"),
    "tier": ("device", "host"),
    "part": ("pod", "pageCache"),
    "source": ("planned", "measured"),
    "stage": ("fetch", "encode"),
    "type": ("Ready", "Stalled", "Reconciling", "BudgetFits"),
    "role": ("frontend", "engine"),
    "state": ("ready", "desired", "pinned", "reserved"),
    "why": ("stale", "pull"),
    "code": ("engine_error", "media_invalid"),
    "exported_namespace": ("models",),
    "exported_pod": ("p",),
}
_STATUS_VALUES = {"http_requests": ("2xx", "5xx"), "foveal_inference_condition": ("True", "False")}


def _series_of(metric: Metric) -> Series:
    """Every combination of label values that expressions choose by, one value of the others."""
    choices = {}
    for label in metric.labels:
        values = _STATUS_VALUES.get(metric.name, ("s",)) if label == "status" else ("x",)
        choices[label] = _LABEL_VALUES.get(label, values)
    scraped = {"namespace": "models", "resource": "qwen", "pod": "p", "role": "engine",
               "revision": "r"}  # fmt: skip
    own = {"namespace": "models", "name": "qwen"} if "operator" in metric.roles else {}
    own |= {"operator": "foveal"} if "operator" in metric.roles else {}
    found: Series = {}
    for combination in itertools.product(*choices.values()):
        labels = {**scraped, **dict(zip(choices, combination, strict=True)), **own}
        text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        if metric.kind == "histogram":
            for bound, step in (("0.1", 30), ("10.0", 60), ("+Inf", 60)):
                found[f'{metric.name}_bucket{{{text},le="{bound}"}}'] = f"0+{step}x60"
            found[f"{metric.name}_sum{{{text}}}"] = found[f"{metric.name}_count{{{text}}}"] = (
                "0+60x60"
            )
        elif metric.kind == "counter":
            # Queries run ahead of hits.
            step = 60 if "hits" in metric.name else 90
            found[f"{metric.name}_total{{{text}}}"] = f"0+{step}x60"
        else:
            high = labels.get("source") == "planned" or "limit" in metric.name
            found[f"{metric.name}{{{text}}}"] = "100000x60" if high else "1+1x60"
    return found


def test_every_panel_has_data_when_every_metric_has(tmp_path: Path) -> None:
    """Catches matchers that exclude each other and divisions whose sides never meet."""
    series: Series = {}
    for metric in KNOWN.values():
        series |= _series_of(metric)
    checks = []
    for where, expr in expressions():
        if where.split(":")[0] not in FILES:
            continue
        for name, value in (("$__rate_interval", "5m"), ("$namespace", "models"),
                            ("$resource", "qwen"), ("$pod", ".*"),
                            ("$installation", "models")):  # fmt: skip
            expr = expr.replace(name, value)
        checks.append(
            {
                "expr": f"(count({expr}) or vector(0)) > bool 0",
                "eval_time": "50m",
                "exp_samples": [{"value": 1}],
            }
        )
    assert len(checks) > 150
    # A query that finds nothing would be seen.
    nothing = {**checks[0], "expr": checks[0]["expr"].replace("models", "nowhere")}
    checks.append({**nothing, "exp_samples": [{"value": 0}]})
    suite = tmp_path / "suite.yaml"
    inputs = [{"series": key, "values": value} for key, value in series.items()]
    one = {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}
    suite.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [one]}, width=10_000))
    promtool("test", "rules", str(suite))
