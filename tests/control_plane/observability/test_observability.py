"""Dashboards and alert rules: as generated, drawn by Grafana's schema, made of declared metrics."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models import dashboard as schema

from foveal_operator.manifests import ClusterFacts
from foveal_operator.observability import (
    resource_dashboards,
    resource_rule_groups,
)
from foveal_operator.observability.alerts import ALERTS
from foveal_operator.observability.boards import BOARDS
from foveal_operator.observability.panel import Board, Panel
from foveal_operator.observability.promql import KNOWN, TARGET_LABELS
from foveal_operator.telemetry.declared import OPERATOR_METRICS, OWN_LABEL, is_shared
from foveal_runtime.plan.metrics import METRICS
from tests.support import grafana, regenerate
from tests.support.observability_files import FILES, expressions
from tests.support.samples import LEGAL

NOT_SHOWN = {
    # The same events as vllm:'s families, for dashboards that know OpenTelemetry's names.
    "gen_ai_server_request_duration_seconds", "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds", "gen_ai_client_token_usage",
    # Of interest when something is examined, not at a glance.
    "vllm:cache_config_info", "vllm:engine_sleep_state",
    "vllm:prompt_tokens", "vllm:prompt_tokens_cached", "vllm:prompt_tokens_cached_by_source",
    "vllm:request_num_preemptions", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens", "vllm:request_params_max_tokens",
    "vllm:request_params_n", "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_inference_time_seconds", "http_request_duration_seconds",
    "foveal_book_entries",
    "foveal_mirror_pulls", "foveal_mirror_needs_received", "foveal_engine_finished",
    "foveal_engine_errors", "foveal_engine_residence_seconds",
    "foveal_engine_steps_without_progress", "foveal_events_published",
    "foveal_prefix_tokens_without_state",
    "foveal_metrics_peers_unreachable", "foveal_prompt_tokens_inflight",
    "foveal_shm_swept_writers", "foveal_media_fetched_bytes",
    "foveal_constrained_requests", "foveal_grammar_compile_seconds", "foveal_grammars_refused",
    "foveal_engine_grammar_lookups", "foveal_engine_grammar_hits", "foveal_engine_grammars_cached",
    "foveal_engine_grammar_compile_seconds", "foveal_engine_grammar_mask_seconds",
    "foveal_engine_grammars_cached_bytes",
    # Of an option that is off by default.
    "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    # For endpoint pickers; the boards show what engines themselves say.
    "foveal_engines_requests_waiting", "foveal_engines_kv_cache_usage",
}  # fmt: skip
_WORDS = {"sum", "max", "min", "avg", "count", "by", "on", "and", "or", "rate", "increase",
          "deriv", "changes", "histogram_quantile", "vector", "time", "absent",
          "offset", "label_replace"}  # fmt: skip


ALL = list(expressions())


def used_metrics(expr: str) -> set[str]:
    """The families an expression reads; fails on anything that is neither metric nor PromQL."""
    found = set()
    labels: set[str] = set()
    for name, inside in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expr):
        found.add(name)
        labels |= {f"{name}|{label}" for label in re.findall(r"(\w+)(?:=~|!=|=)\"", inside)}
    bare = re.sub(r"\{[^}]*\}", "", expr)
    bare = re.sub(r'"[^"]*"', "", bare)
    bare = re.sub(r"\[[^]]*\]", "", bare)
    bare = re.sub(r"offset \w+", "", bare)
    kept = re.findall(r"(?:by|on) \(([^)]*)\)", bare)
    bare = re.sub(r"(?:by|on) \([^)]*\)", "", bare)
    found |= set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - _WORDS
    families = {name: family(name) for name in found}
    for name, label in (pair.split("|") for pair in labels):
        own = OWN_LABEL[0] if is_shared(name) else ""
        allowed = {*KNOWN[families[name]].labels, *TARGET_LABELS, own}
        assert label in allowed, (name, label)
    known = {label for name in families.values() for label in KNOWN[name].labels}
    for label in filter(None, ",".join(kept).replace(" ", "").split(",")):
        assert label in known | TARGET_LABELS | {"le"}, label
    return set(families.values())


def family(series: str) -> str:
    for suffix, kind in (("_total", "counter"), ("_bucket", "histogram"), ("_sum", "histogram"),
                         ("_count", "histogram"), ("", "gauge")):  # fmt: skip
        name = series.removesuffix(suffix) if suffix else series
        if series.endswith(suffix) and name in KNOWN and KNOWN[name].kind == kind:
            return name
    raise AssertionError(f"{series} is not declared")


def test_committed_dashboards_are_what_is_generated() -> None:
    drawn = {**grafana.cluster_files(), **dict([grafana.resource_file()])}
    assert drawn == FILES, "run: make generate"


def test_the_operators_metrics_have_their_page() -> None:
    page = regenerate.OPERATOR_METRICS_PAGE.read_text(encoding="utf-8")
    assert page == regenerate.operator_metrics_page(), "run: make generate"


@pytest.mark.parametrize(("where", "expr"), ALL, ids=[where for where, _ in ALL])
def test_every_expression_reads_declared_metrics(where: str, expr: str) -> None:
    assert used_metrics(expr), where


def test_every_query_of_the_operator_board_selects_foveals_own_series() -> None:
    """Leaders, queues and API requests of every controller in the cluster were summed."""
    found = 0
    for where, expr in expressions():
        if not where.startswith(("foveal-operator.json", "FovealOperator")):
            continue
        for name in used_metrics(expr):
            if is_shared(name):
                for inside in re.findall(rf"\b{name}\w*\{{([^}}]*)\}}", expr):
                    assert 'operator="foveal"' in inside, f"{where}: {expr}"
                    assert "namespace=" in inside, f"{where}: {expr}"
                assert len(re.findall(rf"\b{name}\w*\{{", expr)) == expr.count(name), where
                found += 1
    assert found > 20


def test_the_check_above_finds_what_is_wrong() -> None:
    for wrong in ("sum(foveal_nonsense)", 'foveal_ready{engine="a"}', "foveal_ready_total",
                  "sum by (tier) (foveal_ready)"):  # fmt: skip
        with pytest.raises(AssertionError):
            used_metrics(wrong)


def test_every_metric_is_on_a_dashboard_or_left_out_on_purpose() -> None:
    shown = set().union(*(used_metrics(expr) for _, expr in ALL))
    assert {metric.name for metric in (*METRICS, *OPERATOR_METRICS)} - shown == NOT_SHOWN


@pytest.mark.parametrize("name", FILES)
def test_dashboards_fit_grafanas_schema(name: str) -> None:
    """Read by the schema's own types and written again, nothing is lost or added."""
    raw = json.loads(FILES[name])
    read = schema.Dashboard.from_json(raw)
    assert json.loads(json.dumps(read, cls=_Encoder)) == raw
    assert raw["schemaVersion"] >= 39
    numbers = [panel["id"] for panel in raw["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in raw["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"


class _Encoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        return o.to_json()


def test_boards_have_what_an_operator_chooses_by() -> None:
    assert [board.uid.removeprefix("foveal-") for board in BOARDS] == [
        "overview", "caches", "memory", "mirror", "encoder", "rollout", "operator",
    ]  # fmt: skip
    for board in BOARDS[:-1]:
        raw = json.loads(FILES[f"{board.uid}.json"])
        names = [variable["name"] for variable in raw["templating"]["list"]]
        assert names == ["datasource", "namespace", "resource", "pod"]
        titles = [panel.title for panel in board.panels]
        assert len(set(titles)) == len(titles) or board.uid == "foveal-memory"
    for where, expr in ALL:
        if where.startswith("foveal-operator.json") or "@namespace@" in expr:
            continue
        for selector in re.findall(r"(?:foveal|vllm|http)[\w:]*\{([^}]*)\}", expr):
            assert "namespace" in selector or "$namespace" not in expr, where


def test_rules_and_dashboard_are_pinned_to_their_resource() -> None:
    facts = ClusterFacts(
        apis=regenerate.ALL_APIS,
        rule_groups=resource_rule_groups(),
        dashboards=resource_dashboards(),
    )
    wanted = regenerate.wanted(LEGAL["gpu"], facts)
    [rule] = wanted.of_kind("PrometheusRule")
    [board] = [
        b for b in wanted.of_kind("ConfigMap") if b["metadata"]["name"].endswith("dashboard")
    ]
    for body in (rule, board):
        text = yaml.safe_dump(body)
        assert not re.search(r"@(namespace|resource|id)@", text)
    for group in rule["spec"]["groups"]:
        for one in group["rules"]:
            assert one["labels"]["resource"] == "qwen"
            assert re.search(r'namespace="models",(resource|name)="qwen"', one["expr"])
    raw = json.loads(board["data"]["foveal-resource.json"])
    assert len(raw["uid"]) <= 40
    assert raw["title"] == "Foveal / models / qwen"


def unit_of(expr: str) -> str:
    """What an axis would have to say for this expression: a quantity, and whether per second."""
    units = {
        "time" if name.endswith("_seconds") else
        "bytes" if "_FB_" in name else
        "degrees" if name.endswith("_TEMP") else
        "bytes" if name.endswith(("_bytes", "_bytes_sent", "_bytes_avoided")) else "number"
        for name in used_metrics(expr)
    }  # fmt: skip
    # Bytes of an item, seconds of a step: the upper one, whatever it is divided by.
    unit = min(units)
    if "rate(" not in expr or "histogram_quantile" in expr:
        return unit
    # A ratio of two rates is a mean or a share.
    return unit if " / " in expr else f"{unit}/s"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_an_axis_has_one_unit(board: Board) -> None:
    """Milliseconds, requests and deaths a second shared one scale, and none could be read."""
    for panel in board.panels:
        if panel.shape == "table":  # each column has its own
            continue
        for own in {query.unit for query in panel.queries}:
            found = {unit_of(query.expr) for query in panel.queries if query.unit == own}
            assert len(found) == 1, (panel.title, own, found)
    for panel, raw in drawn_panels(board):
        if panel.shape == "table":
            continue
        overrides = raw.get("fieldConfig", {}).get("overrides", [])
        assert len(overrides) == sum(query.unit is not None for query in panel.queries)
        for one in overrides:
            ids = {value["id"] for value in one["properties"]}
            assert ids == {"unit", "custom.axisPlacement"}, panel.title


def test_a_table_has_a_row_for_its_labels_and_a_named_column_for_each_query() -> None:
    tables = [(panel, raw) for board in BOARDS for panel, raw in drawn_panels(board)
              if panel.shape == "table"]  # fmt: skip
    assert {panel.title for panel, _ in tables} == {"Each cache", "Would more memory help?", "Pods"}
    for panel, raw in tables:
        assert raw["type"] == "table"
        assert [one["id"] for one in raw["transformations"]] == ["merge", "organize"]
        columns = {}
        for one in raw["fieldConfig"]["overrides"]:
            properties = {value["id"]: value["value"] for value in one["properties"]}
            columns[one["matcher"]["options"]] = (properties["displayName"], properties["unit"])
        for query, target in zip(panel.queries, raw["targets"], strict=True):
            assert (target["format"], target["instant"]) == ("table", True)
            assert "range" not in target or not target["range"]
            wanted = (query.legend, query.unit or panel.unit)
            assert columns[f"Value #{target['refId']}"] == wanted
            # Rows of other labels would not become one.
            assert f"by ({','.join(panel.down)})" in query.expr, query.legend
        assert len(columns) == len(panel.queries)


def test_latencies_are_drawn_as_heat_maps_of_their_buckets() -> None:
    maps = [(panel, raw) for panel, raw in drawn_panels(BOARDS[0]) if panel.shape == "buckets"]
    assert [panel.title for panel, _ in maps] == ["First tokens by time", "Token gaps by time"]
    for panel, raw in maps:
        assert raw["type"] == "heatmap"
        assert raw["options"]["calculate"] is False
        assert raw["options"]["yAxis"]["unit"] == "s"
        [target] = raw["targets"]
        assert (target["format"], target["exemplar"]) == ("heatmap", True)
        assert "sum by (le) (increase(" in panel.queries[0].expr


def drawn_panels(board: Board) -> list[tuple[Panel, dict[str, Any]]]:
    raw = json.loads(FILES[f"{board.uid}.json"])["panels"]
    return list(zip(board.panels, (p for p in raw if p["type"] != "row"), strict=True))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_boards_mark_rollouts_and_link_runbooks(board: Board) -> None:
    raw = json.loads(FILES[f"{board.uid}.json"])
    [mark] = [one for one in raw["annotations"]["list"] if one["name"] == "Rollouts"]
    assert used_metrics(mark["expr"]) == {"foveal_inference_observed_generation"}
    for panel, drawn in drawn_panels(board):
        assert [one["url"].rpartition("/")[2] for one in drawn.get("links", [])] == [
            f"{name}.md" for name in panel.runbooks
        ]
        for name in panel.runbooks:
            assert name in {alert.name for alert in ALERTS}, name


def test_latencies_of_requests_ask_for_exemplars() -> None:
    """And nothing else does: Prometheus searches its exemplars for each such query."""
    asked = set()
    for board in BOARDS:
        for panel, drawn in drawn_panels(board):
            for query, target in zip(panel.queries, drawn["targets"], strict=True):
                traced = {name for name in used_metrics(query.expr) if KNOWN[name].is_traced}
                reads_buckets = "_bucket" in query.expr
                assert bool(target.get("exemplar")) == bool(traced and reads_buckets), panel.title
                asked |= traced if target.get("exemplar") else set()
    assert asked >= {
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
        "foveal_first_token_seconds",
    }  # fmt: skip


def test_one_ready_of_eight_is_not_green() -> None:
    """The tile was green from one ready frontend on, however many were asked for."""
    for title in ("Frontends ready", "Engines ready"):
        [(panel, drawn)] = [(p, raw) for p, raw in drawn_panels(BOARDS[0]) if p.title == title]
        assert (panel.unit, panel.warn, panel.bad) == ("percentunit", 1, 0.5)
        assert 'state="desired"' in panel.queries[0].expr
        steps = drawn["fieldConfig"]["defaults"]["thresholds"]["steps"]
        reached = [one["color"] for one in steps if one["value"] is None or one["value"] <= 1 / 8]
        assert reached[-1] == "red"


def test_alerts_say_what_to_do() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)
    for alert in ALERTS:
        assert alert.summary.endswith(".")
        assert alert.about.endswith(".")
        page = regenerate.ROOT / "docs" / "runbooks" / f"{alert.name}.md"
        assert page.is_file(), page
