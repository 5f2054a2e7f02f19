"""Devices claimed from a DeviceClass: Kubernetes changes no claim template, so each has its own."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.kube.kinds import CLAIM_TEMPLATE, INFERENCE, POD
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import workloads
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.operator_rig import KEY, OPTIONAL_KINDS, Kit, resource, with_claim
from tests.support.served_resource import add_pod, see_template, served

CLASS = {"deviceClassName": "gpu.example.com", "memory": "80Gi"}
HOPPER = {"deviceSelectors": ["device.attributes['gpu.example.com'].family == 'Hopper'"]}
NAMED = {"resourceName": "example.com/gpu", "memory": "80Gi"}
UNHASHED = "tiny-engine-devices"


def claiming(**accelerator: Any) -> Obj:
    body = resource()
    engine = {"accelerator": accelerator, "hostMemory": "16Gi"}
    body["spec"]["engine"] = {**body["spec"]["engine"], **engine}
    return body


@pytest.fixture
def kit() -> Kit:
    return Kit(with_claim(FakeCluster(missing=OPTIONAL_KINDS - {CLAIM_TEMPLATE.name})))


async def change(kit: Kit, **accelerator: Any) -> None:
    spec = claiming(**accelerator)["spec"]
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body.update(spec=spec))
    await kit.settle()


def engine_template(kit: Kit) -> Obj:
    found: Obj = kit.cluster.body("StatefulSet", "tiny-engine")["spec"]["template"]
    return found


def asked(kit: Kit) -> Obj:
    """What a new engine's claim asks for; KeyError where its template is not there."""
    (claim,) = engine_template(kit)["spec"]["resourceClaims"]
    made = kit.cluster.body(CLAIM_TEMPLATE.name, claim["resourceClaimTemplateName"])
    found: Obj = made["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    return found


async def roll(kit: Kit) -> None:
    """The engine pod is made anew from the present template, and so is the frontend's."""
    for _ in range(3):
        see_template(kit.cluster)
        await kit.settle()
        for role in ("engine", "frontend"):
            if f"tiny-{role}-0" in kit.cluster.names("Pod"):
                kit.cluster.remove(POD, "default", f"tiny-{role}-0")
            add_pod(kit.cluster, role)
        await kit.settle()


@pytest.mark.parametrize("more", [{"count": 2}, HOPPER, {"deviceClassName": "other.example.com"}])
async def test_a_change_reaches_new_engines(kit: Kit, more: Obj) -> None:
    """The API server refused it after the StatefulSet had changed: new engines got the devices of
    the old template."""
    await served(kit, claiming(**CLASS), pods=True)
    before, (old,) = engine_template(kit), kit.cluster.names(CLAIM_TEMPLATE.name)
    revision = before["metadata"]["labels"][REVISION_LABEL]
    num_writes = len(kit.cluster.writes)
    await change(kit, **{**CLASS, **more})
    assert kit.condition("SpecAccepted") == ("True", "Accepted")
    wanted = {"deviceClassName": "gpu.example.com", "count": 1, **more}
    selectors = [{"cel": {"expression": one}} for one in wanted.pop("deviceSelectors", ())]
    assert asked(kit) == {
        **wanted, "allocationMode": "ExactCount", **({"selectors": selectors} if selectors else {})
    }  # fmt: skip
    assert engine_template(kit)["metadata"]["labels"][REVISION_LABEL] != revision
    kinds = [kind for _, kind, _ in kit.cluster.writes[num_writes:]]
    assert kinds.index(CLAIM_TEMPLATE.name) < kinds.index("StatefulSet")
    assert old in kit.cluster.names(CLAIM_TEMPLATE.name), "running engines name it"
    await roll(kit)
    assert old not in kit.cluster.names(CLAIM_TEMPLATE.name)
    assert len(kit.cluster.names(CLAIM_TEMPLATE.name)) == 1


async def test_a_rollback_finds_the_devices_of_the_last_good_revision(kit: Kit) -> None:
    """They were pruned in the very pass that asked for other devices."""
    await served(kit, claiming(**CLASS), pods=True)
    good, before = engine_template(kit), asked(kit)
    await change(kit, **NAMED)
    assert "resourceClaims" not in engine_template(kit)["spec"]
    assert kit.cluster.names(CLAIM_TEMPLATE.name), "the last good revision names it"
    see_template(kit.cluster)
    await kit.settle()
    assert "tiny-engine-0" not in kit.cluster.names("Pod")
    add_pod(kit.cluster, "engine", ready=False)
    for _ in range(8):
        await kit.settle()
        kit.time.now += 600.0
    await kit.settle()
    assert engine_template(kit) == good, "rolled back"
    assert asked(kit) == before


async def test_other_devices_for_good_leave_no_template_behind(kit: Kit) -> None:
    await served(kit, claiming(**CLASS), pods=True)
    await change(kit, **NAMED)
    await roll(kit)
    assert kit.condition("EnginesReady")[0] == "True"
    assert kit.cluster.names(CLAIM_TEMPLATE.name) == []


async def test_a_newer_operator_restarts_nothing_for_a_name(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed with the release whose template had no hash in its name."""
    monkeypatch.setattr(workloads, "_claimed", lambda spec: "as it is")
    await served(kit, claiming(**CLASS), pods=True)
    assert kit.cluster.names(CLAIM_TEMPLATE.name) == [UNHASHED]
    before = engine_template(kit)
    monkeypatch.undo()
    newer = Kit(kit.cluster)
    await newer.resync()
    await newer.resync()
    assert engine_template(newer) == before
    assert newer.cluster.names(CLAIM_TEMPLATE.name) == [UNHASHED]
    kit.cluster.edit(
        CLAIM_TEMPLATE, "default", UNHASHED, lambda body: body["metadata"].update(labels={})
    )
    await newer.settle()
    await newer.resync()
    assert engine_template(newer) == before, "whatever its labels are"
    await change(newer, **{**CLASS, "count": 2})
    assert asked(newer)["count"] == 2
    assert UNHASHED in newer.cluster.names(CLAIM_TEMPLATE.name)


async def test_a_revert_finds_the_name_that_engines_have(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other devices rolled out, only pods and the last good revision named the old template:
    the reverted spec got another name for the same devices, and engines restarted once more."""
    monkeypatch.setattr(workloads, "_claimed", lambda spec: "as it is")
    await served(kit, claiming(**CLASS), pods=True)
    monkeypatch.undo()
    before = engine_template(kit)
    await change(kit, **NAMED)
    assert engine_template(kit) != before
    await change(kit, **CLASS)
    assert engine_template(kit) == before
    await change(kit, **NAMED)
    await roll(kit)
    await change(kit, **CLASS)
    assert UNHASHED not in kit.cluster.names(CLAIM_TEMPLATE.name), "nothing names it any more"
