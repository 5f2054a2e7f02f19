"""Every generated policy over every pod and flow: what is admitted, and that nothing else is.

Evaluated, not enforced: docs/concepts/security.md says so.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from foveal_operator.kube.kinds import OPERATOR_LABELS
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import ClusterFacts, desired
from foveal_operator.manifests.network import frontend_ports
from foveal_operator.process.options import read
from tests.support.api_server_rules import problems
from tests.support.network_policies import End, admits
from tests.support.regenerate import FACTS, ROOT, planned
from tests.support.samples import LEGAL, put

SPACE = "models"
ENGINE_WIRE, ENGINE_HTTP, PROGRESS, CLIENTS = 5570, 5580, 8000, 8000
DNS = (53, 5353)
PORTS = (ENGINE_WIRE, ENGINE_HTTP, PROGRESS, *DNS, 80, 443, 9000)


def resource(name: str, **changes: Any) -> Obj:
    obj = put(put(LEGAL["cpu"], "metadata.name", name), "metadata.namespace", SPACE)
    for path, value in changes.items():
        obj = put(obj, "spec." + path.replace("__", "."), value)
    return obj


def objects(obj: Obj, facts: ClusterFacts = FACTS) -> list[Obj]:
    inference, plan = planned(obj)
    found = list(desired(inference, plan, facts).objects)
    return [owned.body for owned in (*found, *desired(inference, None, facts).objects)]


def policies(*objs: Obj, facts: ClusterFacts = FACTS) -> list[Obj]:
    every = [body for obj in objs for body in objects(obj, facts)]
    return [body for body in every if body["kind"] == "NetworkPolicy"]


def pods(name: str) -> dict[str, End]:
    """With the labels that the templates give them."""
    found = {}
    for body in objects(resource(name)):
        kind = {"StatefulSet": "engine", "Deployment": "frontend", "Job": "job"}.get(body["kind"])
        if kind:
            found[kind] = End(SPACE, body["spec"]["template"]["metadata"]["labels"])
    return found


OTHERS = {
    "operator": End("foveal-system", OPERATOR_LABELS),
    "neighbour of the operator": End("foveal-system", {"app": "x"}),
    "prometheus": End("monitoring", {"app": "prometheus"}),
    "dns": End("kube-system", {"k8s-app": "kube-dns"}),
    "stranger here": End(SPACE, {"app": "theirs"}),
    "stranger elsewhere": End("default", {"app": "theirs"}),
    "operator's double elsewhere": End("default", OPERATOR_LABELS),
    "hub": End(address="52.1.2.3"),
    "bucket inside": End(address="10.9.8.7"),
}
ENDS = {
    **pods("a"),
    "other engine": pods("a")["engine"],
    **{f"b's {kind}": end for kind, end in pods("b").items()},
    **OTHERS,
}


def allowed(found: list[Obj], *names: str) -> set[tuple[str, str, int]]:
    """(from, to, port) of every flow that one of `names` takes part in."""
    return {
        (one, other, port)
        for one in ENDS
        for other in ENDS
        for port in PORTS
        if one != other and (one in names or other in names)
        and admits(found, ENDS[one], ENDS[other], port, "UDP" if port in DNS else "TCP")
    }  # fmt: skip


def test_who_reaches_an_engine() -> None:
    """The operator's probes were refused: nobody told the policies where it runs."""
    found = {(one, port) for one, other, port in allowed(
        policies(resource("a"), resource("b")), "engine") if other == "engine"}  # fmt: skip
    assert found == {
        ("frontend", ENGINE_WIRE),
        ("frontend", ENGINE_HTTP),
        ("operator", ENGINE_HTTP),
        ("prometheus", ENGINE_HTTP),
    }


@pytest.mark.parametrize(
    ("events", "reader"),
    [({"readerLabels": {"app": "theirs"}}, "stranger here"),
     ({"readerLabels": {"app": "theirs"}, "readerNamespace": "default"}, "stranger elsewhere")],
)  # fmt: skip
def test_who_reads_cache_events(events: Obj, reader: str) -> None:
    """Stream and replay, for the named pods of one namespace; frontends do not read them."""
    found = policies(resource("a", networking__cacheEvents=events), resource("b"))
    ends = {name: end for name, end in ENDS.items() if name != "engine"}
    readers = {
        (name, port)
        for name, end in ends.items()
        for port in (5557, 5558)
        if admits(found, end, ENDS["engine"], port, "TCP")
    }
    assert readers == {(reader, 5557), (reader, 5558)}


def test_whom_an_engine_reaches() -> None:
    """DNS by its ports alone: clusters place their servers differently, and plug-ins that filter
    behind the Service see OpenShift's at 5353. b's pods accept nothing on those, nor do a's."""
    found = allowed(policies(resource("a"), resource("b")), "engine")
    out = {(other, port) for one, other, port in found if one == "engine"}
    assert out == {(name, port) for name in OTHERS for port in DNS}


@pytest.mark.parametrize("domains", [(), ("example.org",)])
def test_whom_a_frontend_reaches(domains: tuple[str, ...]) -> None:
    """Media from outside only when asked for, never from private addresses."""
    changes = {"security__mediaSources": {"allowedDomains": list(domains)}} if domains else {}
    found = allowed(policies(resource("a", **changes), resource("b")), "frontend")
    out = {(other, port) for one, other, port in found if one == "frontend"}
    expected = {(name, port) for name in OTHERS for port in DNS}
    engines = ("engine", "other engine")
    expected |= {(name, port) for name in engines for port in (ENGINE_WIRE, ENGINE_HTTP)}
    if domains:
        expected |= {("hub", 80), ("hub", 443)}
    assert out == expected


def test_who_reaches_a_frontend() -> None:
    """Clients from anywhere, on the one port; engines and other resources' pods reach nothing."""
    found = allowed(policies(resource("a"), resource("b")), "frontend")
    into = {(one, port) for one, other, port in found if other == "frontend"}
    assert into == {(name, CLIENTS) for name in (*OTHERS, "job", "b's job")}


def test_frontends_are_reached_while_their_port_changes() -> None:
    """The policy changes at once, the pods one by one: those that still served the old port were
    cut off, and with one frontend nobody was left. A named port is no way: OVN-Kubernetes takes it
    for all ports, OpenShift SDN for none."""
    changed = resource("a", networking__port=9000)
    (old,) = [one for one in objects(resource("a")) if one["kind"] == "Deployment"]
    client, frontend = ENDS["stranger elsewhere"], ENDS["frontend"]
    assert frontend_ports([old["spec"]["template"]]) == (CLIENTS,)
    for ports, reached in (((CLIENTS,), {CLIENTS, 9000}), ((9000,), {9000}), ((), {9000})):
        found = policies(changed, facts=replace(FACTS, frontend_ports=ports))
        assert {port for port in PORTS if admits(found, client, frontend, port)} == reached


def test_every_port_of_a_policy_is_a_number() -> None:
    for name in LEGAL:
        for policy in policies(LEGAL[name]):
            rules = (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ()))
            numbers = [port["port"] for rule in rules for port in rule.get("ports", ())]
            assert all(type(number) is int for number in numbers), name


PAGE = ROOT / "docs/how-to/observability.md"


def test_the_documented_policy_lets_frontends_send_traces() -> None:
    """The page named a collector that the generated policy keeps them from: spans were lost."""
    (text,) = [block for block in PAGE.read_text().split("```") if "kind: NetworkPolicy" in block]
    body, policy = yaml.safe_load_all(text.removeprefix("yaml"))
    assert problems(body) == []
    (container,) = body["spec"]["frontend"]["podTemplate"]["spec"]["containers"]
    (entry,) = container["env"]
    port = int(entry["value"].rpartition(":")[2])
    labels = policy["spec"]["egress"][0]["to"][0]["podSelector"]["matchLabels"]
    collector, own = End("monitoring", labels), policies(resource("qwen"))
    frontend, engine = pods("qwen")["frontend"], pods("qwen")["engine"]
    assert not admits(own, frontend, collector, port)
    more = [*own, policy]
    assert admits(more, frontend, collector, port)
    assert not admits(more, frontend, OTHERS["prometheus"], port)
    assert not admits(more, frontend, collector, 80)
    assert not admits(more, engine, collector, port)
    assert admits(more, frontend, engine, ENGINE_WIRE), "what the operator's policy admits"


def test_the_documented_image_has_the_api_s_version_of_opentelemetry() -> None:
    pins = (ROOT / "requirements/runtime.txt").read_text()
    (version,) = re.findall(r"^opentelemetry-api==(\S+)", pins, re.MULTILINE)
    assert "opentelemetry-sdk" not in pins, "then the page is wrong"
    added = re.findall(r"opentelemetry-[a-z-]+==(\S+)", PAGE.read_text())
    assert added == [version, version]


def test_jobs_reach_any_source_and_tell_the_operator_alone() -> None:
    """In a namespace that denies by default, a fetch had no way to its hub."""
    deny: Obj = {"metadata": {"namespace": SPACE},
                 "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}  # fmt: skip
    found = allowed([*policies(resource("a"), resource("b")), deny], "job")
    assert {("job", "hub", 443), ("job", "bucket inside", 9000)} <= found
    assert {("job", "dns", port) for port in DNS} <= found
    assert {(one, port) for one, other, port in found if other == "job"} == {("operator", PROGRESS)}


def test_without_a_pod_of_its_own_the_operator_is_admitted_nowhere() -> None:
    """Nor is anybody else: an empty list of peers would mean everybody."""
    facts = replace(FACTS, operator_namespace="", monitoring_namespace="")
    found = allowed(policies(resource("a"), resource("b"), facts=facts), "engine", "job")
    assert {one for one, other, _ in found if other == "engine"} == {"frontend"}
    assert not {one for one, other, _ in found if other == "job"}


def test_the_process_reads_its_namespace() -> None:
    assert read([], {"POD_NAMESPACE": "foveal-system"}).settings.operator_namespace == (
        "foveal-system"
    )
    assert read([], {}).settings.operator_namespace == ""
