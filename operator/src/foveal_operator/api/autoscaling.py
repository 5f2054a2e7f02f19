"""When the number of frontends or engines follows from load: a HorizontalPodAutoscaler or KEDA.

Part of the tree in spec.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from foveal_operator.api.rules import ObjectName, Part, Rule, Url

Target = Annotated[int, Meta(ge=1, le=1_000_000)]
# What both roles have. Aliases, not a base class: its fields would come first in the schema.
MinReplicas = Annotated[int, Meta(ge=1, le=256), Meta(description="At least. Default: 1.")]
MaxReplicas = Annotated[int, Meta(ge=1, le=256), Meta(description="At most.")]
Stabilization = Annotated[
    int, Meta(ge=0, le=3600), Meta(description="Wait before scaling down. Default: 600.")
]
_MIN_MAX = Rule(
    "(has(self.minReplicas) ? self.minReplicas : 1) <= self.maxReplicas",
    "minReplicas must not exceed maxReplicas",
    lambda s: s.min_replicas <= s.max_replicas,
    "minReplicas",
)


class PrometheusAuth(Part, frozen=True, kw_only=True):
    """How KEDA proves to Prometheus who it is."""

    name: Annotated[
        ObjectName, Meta(description="TriggerAuthentication in the resource's namespace.")
    ]
    mode: Annotated[
        Literal["Bearer", "Basic", "TLS"], Meta(description="What it holds. Default: Bearer.")
    ] = "Bearer"


OptionalAuth = Annotated[PrometheusAuth | None, Meta(description="How, where it wants to know.")]


class FrontendAutoscaling(Part, frozen=True, kw_only=True):
    """Scales frontends; the operator then leaves their number alone."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        _MIN_MAX,
        Rule(
            "!has(self.metric) || self.metric == 'CPU' || has(self.prometheusAddress)",
            "metrics other than CPU come from Prometheus: set prometheusAddress",
            lambda s: s.metric == "CPU" or s.prometheus_address is not None,
            "prometheusAddress",
        ),
        Rule(
            "!has(self.prometheusAuth) || (has(self.metric) && self.metric != 'CPU')",
            "metric CPU asks no Prometheus: remove prometheusAuth",
            lambda s: s.prometheus_auth is None or s.metric != "CPU",
            "prometheusAuth",
        ),
        Rule(
            "!(has(self.target) && self.target > 100) || (has(self.metric)"
            " && self.metric != 'CPU')",
            "the target of metric CPU is a percentage, at most 100",
            lambda s: s.target is None or s.target <= 100 or s.metric != "CPU",
            "target",
        ),
    )
    min_replicas: MinReplicas = 1
    max_replicas: MaxReplicas
    metric: Annotated[
        Literal["CPU", "PreprocessQueue", "Concurrency"],
        Meta(
            description="CPU (default) uses a HorizontalPodAutoscaler; PreprocessQueue and "
            "Concurrency use a KEDA ScaledObject."
        ),
    ] = "CPU"
    target: Annotated[
        Target | None,
        Meta(description="Per pod: percent of CPU (default 70), queued items (4), requests (64)."),
    ] = None
    scale_down_stabilization_seconds: Stabilization = 600
    prometheus_address: Annotated[
        Url | None, Meta(description="Prometheus server that KEDA asks.")
    ] = None
    prometheus_auth: OptionalAuth = None


class EngineAutoscaling(Part, frozen=True, kw_only=True):
    """Scales engines through KEDA; the operator then leaves their number alone."""

    RULES: ClassVar[tuple[Rule, ...]] = (_MIN_MAX,)
    min_replicas: MinReplicas = 1
    max_replicas: MaxReplicas
    metric: Annotated[
        Literal["RunningRequests", "KVUsage"],
        Meta(description="Requests in an engine's batch (default), or KV cache use in percent."),
    ] = "RunningRequests"
    target: Annotated[
        Target | None, Meta(description="Per engine: requests (default 64) or percent (80).")
    ] = None
    scale_down_stabilization_seconds: Stabilization = 600
    prometheus_address: Annotated[Url, Meta(description="Prometheus server that KEDA asks.")]
    prometheus_auth: OptionalAuth = None
