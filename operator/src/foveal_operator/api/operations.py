"""Rollout, networking, security and observability parts of the resource."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from foveal_operator.api.rules import (
    DataKey,
    Domain,
    HostName,
    LabelValue,
    ObjectName,
    Part,
    Rule,
    Text,
    bounded,
)

Port = Annotated[int, Meta(ge=1, le=65_535)]
Weight = Annotated[int, Meta(ge=0, le=1_000_000)]
NumEngines = Annotated[int, Meta(ge=1, le=64)]
Toggle = Literal["Auto", "Enabled", "Disabled"]


class SecretKey(Part, frozen=True, kw_only=True):
    """One key of a Secret in the resource's namespace."""

    name: Annotated[ObjectName, Meta(description="Name of the Secret.")]
    key: Annotated[DataKey, Meta(description="Key inside the Secret; default: key.")] = "key"


class Rollout(Part, frozen=True, kw_only=True):
    """How engines and frontends are replaced."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(has(self.drainTimeoutSeconds) ? self.drainTimeoutSeconds : 120)"
            " < (has(self.progressDeadlineSeconds) ? self.progressDeadlineSeconds : 1800)",
            "drainTimeoutSeconds must be below progressDeadlineSeconds",
            lambda s: s.drain_timeout_seconds < s.progress_deadline_seconds,
            "drainTimeoutSeconds",
        ),
    )
    strategy: Annotated[
        Literal["Auto", "Surge", "FreeFirst", "OnDelete"],
        Meta(
            description="Surge starts a new engine before an old one stops; FreeFirst frees its "
            "device first; Auto (default) surges when a device is free; OnDelete waits for you."
        ),
    ] = "Auto"
    max_surge: Annotated[NumEngines, Meta(description="Engines above desired. Default: 1.")] = 1
    max_unavailable: Annotated[
        NumEngines, Meta(description="Engines down at once. Default: 1.")
    ] = 1
    drain_timeout_seconds: Annotated[
        Annotated[int, Meta(ge=0, le=3600)],
        Meta(description="How long running streams may finish or move. Default: 120."),
    ] = 120
    progress_deadline_seconds: Annotated[
        Annotated[int, Meta(ge=60, le=86_400)],
        Meta(description="A new revision must serve within this time. Default: 1800."),
    ] = 1800
    auto_rollback: Annotated[
        bool, Meta(description="Go back to the last good revision after that. Default: true.")
    ] = True


class ParentRef(Part, frozen=True, kw_only=True):
    """A Gateway that the HTTPRoute attaches to."""

    name: Annotated[ObjectName, Meta(description="Name of the Gateway.")]
    namespace: Annotated[ObjectName | None, Meta(description="Its namespace.")] = None
    section_name: Annotated[ObjectName | None, Meta(description="Its listener.")] = None


_SEGMENT = "[A-Za-z0-9_~!$&'()*+,;=:@-][A-Za-z0-9._~!$&'()*+,;=:@-]*"


class HeaderMatch(Part, frozen=True, kw_only=True):
    """A request header with an exact value."""

    name: Annotated[
        Annotated[str, bounded(256, r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")],
        Meta(description="Name, in any case."),
    ]
    value: Annotated[Annotated[str, bounded(1024)], Meta(description="Its whole value.")]


class RouteMatch(Part, frozen=True, kw_only=True):
    """Requests that are for this model: all that is set must match."""

    path: Annotated[
        Annotated[str, bounded(1024, rf"^/({_SEGMENT}(/{_SEGMENT})*/?)?$")],
        Meta(description="Prefix of the path, by whole segments. Default: /."),
    ] = "/"
    headers: Annotated[
        Annotated[
            tuple[HeaderMatch, ...],
            Meta(max_length=16, extra_json_schema={"x-foveal-list-map": "name"}),
        ],
        Meta(description="Headers that must all be there."),
    ] = ()
    strip_path: Annotated[
        bool, Meta(description="Frontends see the path without the prefix. Default: false.")
    ] = False


class RouteSplit(Part, frozen=True, kw_only=True):
    """Another MultiModalInference of the namespace that takes a share of the requests."""

    name: Annotated[ObjectName, Meta(description="Its name.")]
    port: Annotated[Port, Meta(description="Its port. Default: 8000.")] = 8000
    weight: Annotated[Weight, Meta(description="Its share, as httpRoute.weight.")]


class HttpRoute(Part, frozen=True, kw_only=True):
    """An HTTPRoute to the frontends."""

    parent_refs: Annotated[
        Annotated[tuple[ParentRef, ...], Meta(min_length=1, max_length=8)],
        Meta(description="Gateways to attach to."),
    ]
    hostnames: Annotated[
        Annotated[tuple[HostName, ...], Meta(max_length=16)],
        Meta(description="Host names, such as *.example.org; none = all of the listener."),
    ] = ()
    matches: Annotated[
        Annotated[tuple[RouteMatch, ...], Meta(max_length=8)],
        Meta(description="Requests to take, any of these; none = all of the host names."),
    ] = ()
    weight: Annotated[
        Weight, Meta(description="Share of this resource beside those of splits. Default: 1.")
    ] = 1
    splits: Annotated[
        Annotated[
            tuple[RouteSplit, ...],
            Meta(max_length=8, extra_json_schema={"x-foveal-list-map": "name"}),
        ],
        Meta(description="Resources that share the route, such as a canary."),
    ] = ()


class InferencePool(Part, frozen=True, kw_only=True):
    """An InferencePool over the frontends, for gateways with an endpoint picker."""

    endpoint_picker: Annotated[ObjectName, Meta(description="Service of the endpoint picker.")]
    endpoint_picker_port: Annotated[Port, Meta(description="Its port. Default: 9002.")] = 9002


class ClientService(Part, frozen=True, kw_only=True):
    """The Service that clients use."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.annotations) || self.annotations.all(k, !k.contains('foveal.dev/'))",
            "annotations of foveal.dev belong to the operator: remove them",
            lambda s: not any("foveal.dev/" in key for key in s.annotations),
            "annotations",
        ),
        Rule(
            "!has(self.annotations) || self.annotations.all(k, k.size() > 0 && k.size() <= 317)",
            "a name of annotations has 1 to 317 characters",
            lambda s: all(0 < len(key) <= 317 for key in s.annotations),
            "annotations",
        ),
    )
    type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"],
        Meta(description="Who reaches it. Default: ClusterIP."),
    ] = "ClusterIP"
    annotations: Annotated[
        Annotated[dict[str, Annotated[str, Meta(max_length=1024)]], Meta(max_length=32)],
        Meta(description="For load balancers and the like; those of others stay."),
    ] = msgspec.field(default_factory=dict)


class CacheEvents(Part, frozen=True, kw_only=True):
    """A stream of what engines' caches hold, for routers that score engines by it."""

    format: Annotated[
        Literal["VLLM", "Foveal"],
        Meta(
            description="Schema: vLLM's KV events (default), which readers get without encryption, "
            "or Foveal's own, encrypted, with media and encoder outputs too."
        ),
    ] = "VLLM"
    topic: Annotated[
        Text | None,
        Meta(
            description="Topic of the stream; $(POD_IP) and $(POD_NAME) are the engine's. Default: "
            "the schema's own (VLLM: none)."
        ),
    ] = None
    reader_labels: Annotated[
        Annotated[
            dict[Annotated[str, Meta(max_length=317)], LabelValue],
            Meta(min_length=1, max_length=16),
        ],
        Meta(description="Labels of the pods that may read: events name token ids of prompts."),
    ]
    reader_namespace: Annotated[
        ObjectName | None, Meta(description="Their namespace. Default: the resource's.")
    ] = None


class Networking(Part, frozen=True, kw_only=True):
    """How clients reach the model."""

    port: Annotated[
        Annotated[int, Meta(ge=1024, le=65_535)],
        Meta(description="Port of the Service and of the frontends. Default: 8000."),
    ] = 8000
    service: Annotated[ClientService, Meta(description="The Service that clients use.")] = (
        ClientService()
    )
    http_route: Annotated[
        HttpRoute | None, Meta(description="Make an HTTPRoute (Gateway API).")
    ] = None
    inference_pool: Annotated[InferencePool | None, Meta(description="Make an InferencePool.")] = (
        None
    )
    cache_events: Annotated[
        CacheEvents | None,
        Meta(
            description="Engines publish what their caches hold on port 5557, and replay it on "
            "5558. Default: off."
        ),
    ] = None


class LocalFiles(Part, frozen=True, kw_only=True):
    """Files that file: URLs may name: a claim, mounted read-only into frontends."""

    claim_name: Annotated[ObjectName, Meta(description="An existing PersistentVolumeClaim.")]


class MediaSources(Part, frozen=True, kw_only=True):
    """Where media may come from, besides data: URLs."""

    allowed_domains: Annotated[
        Annotated[tuple[Domain, ...], Meta(max_length=64)],
        Meta(description="Host names; .example.org is a domain and all below. None = no fetching."),
    ] = ()
    fetch_timeout_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=300)],
        Meta(description="One item must be here by then. Default: 10."),
    ] = 10
    local_files: Annotated[
        LocalFiles | None,
        Meta(description="Allow file: URLs; file:///a.png is a.png on the claim."),
    ] = None


class Injection(Part, frozen=True, kw_only=True):
    """External processes may inject processed media."""

    key_secret_ref: Annotated[SecretKey, Meta(description="Key that injectors present.")]
    trusted: Annotated[
        bool,
        Meta(description="Injected items share the cache keys of uploaded media. Default: false."),
    ] = False


Origin = Annotated[str, Meta(max_length=253, pattern=r"^(\*|https?://[A-Za-z0-9.\[\]:-]+)$")]


class Security(Part, frozen=True, kw_only=True):
    """Who may call, and what pods may reach."""

    api_key_secret_ref: Annotated[
        SecretKey | None, Meta(description="Keys that clients present, one a line.")
    ] = None
    admin_key_secret_ref: Annotated[
        SecretKey | None, Meta(description="Key for caches, LoRA adapters and the quarantine.")
    ] = None
    injection: Annotated[Injection | None, Meta(description="Allow injected media.")] = None
    tenant_salt_header: Annotated[
        Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z][-A-Za-z0-9]*$")] | None,
        Meta(description="Request header that separates tenants' cache keys."),
    ] = None
    allowed_origins: Annotated[
        Annotated[tuple[Origin, ...], Meta(max_length=64)],
        Meta(description="Origins of web pages that may call (CORS); * is any. Default: none."),
    ] = ()
    media_sources: Annotated[MediaSources, Meta(description="Where media may be fetched from.")] = (
        MediaSources()
    )
    network_policy: Annotated[
        Literal["Enabled", "Disabled"],
        Meta(description="NetworkPolicies around frontends and engines. Default: Enabled."),
    ] = "Enabled"
    secret_revision: Annotated[
        LabelValue | None,
        Meta(description="Change it to restart pods, as after a Secret changed."),
    ] = None


_TOGGLE = "Auto (default): when the cluster has the API. Enabled, Disabled."


class Observability(Part, frozen=True, kw_only=True):
    """Monitoring objects made for this resource."""

    pod_monitor: Annotated[Toggle, Meta(description="PodMonitor. " + _TOGGLE)] = "Auto"
    prometheus_rule: Annotated[Toggle, Meta(description="PrometheusRule. " + _TOGGLE)] = "Auto"
    dashboard: Annotated[
        Toggle, Meta(description="Dashboard ConfigMap. Auto (default): with the PodMonitor.")
    ] = "Auto"
    labels: Annotated[
        Annotated[dict[Annotated[str, Meta(max_length=63)], LabelValue], Meta(max_length=16)],
        Meta(description="Labels that your Prometheus selects monitors and rules by."),
    ] = msgspec.field(default_factory=dict)
