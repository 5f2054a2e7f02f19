"""Draws boards/ as Grafana dashboards with Grafana's own builder library (its 11.x line).

Run by `make generate` and by the test that compares; the only importer of the library, which is a
development dependency. What it draws is committed: the resource's dashboard as package data of the
operator, the others in the chart.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as cm
from grafana_foundation_sdk.models import dashboard as dm
from grafana_foundation_sdk.models import heatmap as hm
from grafana_foundation_sdk.models import prometheus as pm

from foveal_operator.observability.alerts import RUNBOOKS
from foveal_operator.observability.boards import BOARDS
from foveal_operator.observability.boards.overview import OVERVIEW
from foveal_operator.observability.panel import Board, Panel, Query, Shape, Unit
from foveal_operator.observability.promql import DASHBOARD, KNOWN, OPERATOR_DASHBOARD

_SOURCE = dm.DataSourceRef("prometheus", "${datasource}")
_VARIABLES = {
    "installation": 'label_values(foveal_operator_watch_is_up, namespace)',
    "namespace": 'label_values(foveal_build_info, namespace)',
    "resource": 'label_values(foveal_build_info{namespace=~"$namespace"}, resource)',
    "pod": 'label_values(foveal_build_info{namespace=~"$namespace",resource=~"$resource"}, pod)',
}  # fmt: skip
_ALL = dm.VariableOption(True, ["All"], ["$__all"])


def cluster_files() -> dict[str, str]:
    """File name to JSON of every dashboard that a cluster has once."""
    return {f"{board.uid}.json": draw(board) for board in BOARDS}


def resource_file() -> tuple[str, str]:
    """The overview of one resource, with tokens that manifests/monitoring.py fills in. In one line,
    since each resource has a ConfigMap of it; people read and review the chart's
    foveal-overview.json, which is the same otherwise."""
    pinned = msgspec.structs.replace(
        OVERVIEW, uid="foveal-@id@", title="Foveal / @namespace@ / @resource@"
    )
    chosen = {"namespace": "@namespace@", "resource": "@resource@"}
    drawn = json.loads(draw(pinned, chosen))
    return "foveal-resource.json", json.dumps(drawn, separators=(",", ":")) + "\n"


def draw(board: Board, chosen: dict[str, str] | None = None) -> str:
    """The same JSON on every machine. `chosen` are variables' first values."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(["foveal"])
        .readonly()
        .tooltip(dm.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Source").type("prometheus")
        )
        .annotation(
            dashboard.AnnotationQuery()
            .name("Rollouts")
            .datasource(_SOURCE)
            .enable(True)
            .icon_color("purple")
            .expr(_rollouts(board))
        )
        .link(
            dashboard.DashboardLink("Foveal")
            .type(dm.DashboardLinkType.DASHBOARDS)
            .tags(["foveal"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for name in board.variables:
        made = made.with_variable(_variable(name, (chosen or {}).get(name)))
    number = 0
    for row in board.rows:
        number += 1
        made = made.with_row(dashboard.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_panel(panel).id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _rollouts(board: Board) -> str:
    """Marks where the operator took up a changed spec."""
    scope = DASHBOARD if "namespace" in board.variables else OPERATOR_DASHBOARD
    changes = f"changes(%s[{scope.window}])"
    seen = scope.total(
        "foveal_inference_observed_generation", "namespace,name", how="max", inner=changes
    )
    return f"{seen} > 0"


def _variable(name: str, chosen: str | None) -> dashboard.QueryVariable:
    current = _ALL if chosen is None else dm.VariableOption(True, [chosen], [chosen])
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query({"query": _VARIABLES[name], "refId": f"foveal-{name}"})
        .refresh(dm.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dm.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(current)
    )


Drawn = timeseries.Panel | stat.Panel | statushistory.Panel | heatmap.Panel | table.Panel


def _panel(panel: Panel) -> Drawn:
    make: dict[Shape, Callable[[Panel], Drawn]] = {
        "timeseries": _timeseries, "stat": _stat, "pairs": _pairs, "buckets": _buckets,
        "table": _table,
    }  # fmt: skip
    made = (
        make[panel.shape](panel)
        .links([_runbook(name) for name in panel.runbooks])
        .title(panel.title)
        .description(panel.about)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(panel.height)
    )
    if panel.bad is not None and panel.warn is not None:
        made = made.thresholds(_thresholds(panel.warn, panel.bad))
        if isinstance(made, timeseries.Panel):
            mode = cm.GraphThresholdsStyleMode.DASHED
            made = made.thresholds_style(common.GraphThresholdsStyleConfig().mode(mode))
    for number, query in enumerate(panel.queries):
        ref = chr(ord("A") + number)
        target = _query(query, ref)
        if panel.shape == "buckets":
            target = target.format(pm.PromQueryFormat.HEATMAP)
        if panel.shape == "table":
            made = made.with_target(target.instant().format(pm.PromQueryFormat.TABLE))
            made = made.override_by_name(f"Value #{ref}", _column(query, panel.unit))
            continue
        made = made.with_target(target)
        if query.unit is not None:
            own = (("unit", query.unit), ("custom.axisPlacement", "right"))
            made = made.override_by_query(
                ref, [dm.DynamicConfigValue(key, value) for key, value in own]
            )
    return made


def _runbook(alert: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(alert)
        .type(dm.DashboardLinkType.LINK)
        .url(f"{RUNBOOKS}/{alert}.md")
        .target_blank(True)
    )


def _timeseries(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(40 if panel.stacked else 8)
        .show_points(cm.VisibilityMode.NEVER)
        .axis_soft_min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(cm.LegendDisplayMode.LIST)
            .placement(cm.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(cm.TooltipDisplayMode.MULTI)
            .sort(cm.SortOrder.DESCENDING)
        )
    )
    if panel.stacked:
        made = made.stacking(common.StackingConfig().mode(cm.StackingMode.NORMAL).group("A"))
    if panel.top is not None:
        made = made.max(panel.top).min(0)
    return made


def _pairs(panel: Panel) -> statushistory.Panel:
    """A row for each pair, a column for each time, the value as colour: Grafana's own heat map is
    for buckets of a histogram."""
    made = (
        statushistory.Panel()
        .color_scheme(dashboard.FieldColor().mode(dm.FieldColorModeId.CONTINUOUS_BLUES))
        .show_value(cm.VisibilityMode.NEVER)
        .row_height(0.9)
        .fill_opacity(90)
        .line_width(0)
        .legend(common.VizLegendOptions().show_legend(False))
    )
    return made if panel.top is None else made.max(panel.top).min(0)


def _buckets(panel: Panel) -> heatmap.Panel:
    """Prometheus counts the buckets; Grafana takes the differences."""
    unit = heatmap.YAxisConfig().unit(panel.unit)
    colours = heatmap.HeatmapColorOptions().mode(hm.HeatmapColorMode.SCHEME).scheme("Blues")
    return heatmap.Panel().calculate(False).y_axis(unit).color(colours.steps(32).exponent(0.5))


def _table(panel: Panel) -> table.Panel:
    """Rows of all queries with the same labels become one."""
    return table.Panel().with_transformation(
        dm.DataTransformerConfig("merge", options={})
    ).with_transformation(
        dm.DataTransformerConfig("organize", options={"excludeByName": {"Time": True}})
    )  # fmt: skip


def _column(query: Query, otherwise: Unit) -> list[dm.DynamicConfigValue]:
    unit = query.unit or otherwise
    found: list[tuple[str, object]] = [("displayName", query.legend), ("unit", unit)]
    if unit == "percentunit":
        found += [("min", 0), ("max", 1), ("custom.cellOptions", {"type": "gauge"})]
    return [dm.DynamicConfigValue(key, value) for key, value in found]


def _stat(panel: Panel) -> stat.Panel:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _thresholds(warn: float, bad: float) -> dashboard.ThresholdsConfig:
    """Green, yellow from `warn` on, red from `bad` on; the other way round where less is worse."""
    first, low, high = ("red", bad, warn) if bad < warn else ("green", warn, bad)
    steps = [dm.Threshold(None, first), dm.Threshold(low, "yellow"),
             dm.Threshold(high, "green" if bad < warn else "red")]  # fmt: skip
    return dashboard.ThresholdsConfig().mode(dm.ThresholdsMode.ABSOLUTE).steps(steps)


def _query(query: Query, ref: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(_SOURCE)
    if query.legend:
        made = made.legend_format(query.legend)
    traced = (name for name, metric in KNOWN.items() if metric.is_traced)
    has_exemplars = any(f"{name}_bucket" in query.expr for name in traced)
    return made.range().exemplar(True) if has_exemplars else made.range()
