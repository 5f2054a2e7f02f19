"""The Secret of the transport's keys: created once, never read, replaced as a whole."""

from __future__ import annotations

from foveal_operator.kube.errors import UserError
from foveal_operator.kube.kinds import (
    BY_NAME,
    POD,
)
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.pods import SESSION_GROUP_LABEL
from tests.support.operator_rig import (
    KEY,
    Kit,
)
from tests.support.served_resource import served


async def test_the_key_secret_is_created_once_and_never_read(kit: Kit) -> None:
    await served(kit)
    data = kit.cluster.body("Secret", "tiny-curve")["stringData"]
    assert {len(value) for value in data.values()} == {40}
    again = Kit(kit.cluster)
    await again.start()
    await again.settle()
    assert kit.cluster.body("Secret", "tiny-curve")["stringData"] == data
    verbs = {verb for verb, kind, _ in kit.cluster.calls if kind == "Secret"}
    assert verbs == {"POST"}


def session_group(kit: Kit, kind: str, name: str) -> str:
    labels = kit.cluster.body(kind, name)["spec"]["template"]["metadata"]["labels"]
    return str(labels[SESSION_GROUP_LABEL])


def set_phase(kit: Kit, name: str, phase: str) -> None:
    def change(body: Obj) -> None:
        body["status"] = {"phase": phase}

    kit.cluster.edit(POD, "default", name, change, manager="kubelet")


async def test_a_key_secret_that_vanished_under_pods_replaces_them_all(kit: Kit) -> None:
    """New keys under the old revision would let new pods start that the old ones refuse."""
    await served(kit, pods=True)
    before = session_group(kit, "StatefulSet", "tiny-engine")
    kit.cluster.remove(BY_NAME["Secret"], "default", "tiny-curve")
    await kit.resync()
    assert kit.cluster.names("Secret") == ["tiny-curve"]
    after = session_group(kit, "StatefulSet", "tiny-engine")
    assert after != before
    events = [body for key, body in kit.cluster.objects.items() if key[0] == "Event"]
    assert "KeysReplaced" in {body["reason"] for body in events}
    writes = len(kit.cluster.writes)
    await kit.resync()
    assert len(kit.cluster.writes) == writes, "a Secret that is there is left alone"


async def test_a_key_secret_that_no_pod_has_used_is_simply_made_again(kit: Kit) -> None:
    """Pods wait for it: nothing runs with other keys, so nothing need be replaced."""
    await served(kit, pods=True)
    before = session_group(kit, "StatefulSet", "tiny-engine")
    for kind, _, name in list(kit.cluster.objects):
        if kind == "Pod":
            set_phase(kit, name, "Pending")
    kit.cluster.remove(BY_NAME["Secret"], "default", "tiny-curve")
    kit.time.now += 31
    await kit.settle()
    assert kit.cluster.names("Secret") == ["tiny-curve"]
    assert session_group(kit, "StatefulSet", "tiny-engine") == before


async def test_a_full_quota_does_not_make_keys_look_lost(kit: Kit) -> None:
    """The API server counts before it looks whether the name is taken."""
    await served(kit, pods=True)
    before = session_group(kit, "StatefulSet", "tiny-engine")
    kit.fail(UserError("exceeded quota: secrets", 403), kind="Secret")
    await kit.resync()
    assert session_group(kit, "StatefulSet", "tiny-engine") == before
    assert kit.condition("SpecAccepted")[0] == "True"


async def test_an_operator_that_dies_between_note_and_keys_mixes_none(kit: Kit) -> None:
    """The generation is noted before the keys are made; its successor goes on from there."""
    await served(kit, pods=True)
    before = session_group(kit, "StatefulSet", "tiny-engine")
    kit.cluster.remove(BY_NAME["Secret"], "default", "tiny-curve")
    kit.operator.reconciler.doubt()
    await kit.operator.reconciler.reconcile(KEY)  # notes it, and dies
    assert kit.cluster.names("Secret") == []
    again = Kit(kit.cluster)
    await again.start()
    await again.settle()
    assert kit.cluster.names("Secret") == ["tiny-curve"]
    assert session_group(kit, "StatefulSet", "tiny-engine") != before
    tries = sum(1 for verb, kind, _ in kit.cluster.calls if (verb, kind) == ("POST", "Secret"))
    assert tries == 4, "asked for, made, missed, made"
