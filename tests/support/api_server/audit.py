"""What must hold of every request of the operator, whatever else goes wrong. Called by the proxy.

Each rule is one method with a line of what it protects from; a broken one is noted in
`violations`, which tests assert to be empty. Never changes a request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime

from foveal_operator.kube.types import Obj
from tests.support.api_server.calls import Call

ENGINE = ("app.kubernetes.io/component", "engine")
INSTANCE = "app.kubernetes.io/instance"
RESOURCE = "multimodalinferences"


class Audit:
    """The rules and what they remember.

    Args:
        needs_lease: writes are only for the holder of the Lease (its client, for as long as it
            renewed it for).
        num_devices: the most devices a resource's engines may ask for, by (namespace, name).
    """

    def __init__(
        self,
        *,
        needs_lease: bool = False,
        num_devices: Callable[[str, str], int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.violations: list[str] = []
        self._needs_lease = needs_lease
        self._num_devices = num_devices
        self._now = now
        self._holder, self._lease_until = "", 0.0
        self._last: dict[tuple[str, str], tuple[str, str]] = {}
        self._engine_sets: dict[tuple[str, str], set[str]] = {}

    @property
    def holder(self) -> str:
        """The client that holds the Lease, by what it wrote last; "" = nobody."""
        return self._holder

    def forget(self, client: str) -> None:
        """A client starts anew: a first look at everything is no repetition."""
        self._last = {key: value for key, value in self._last.items() if key[0] != client}

    # --- when a request comes in ---------------------------------------------------------------
    def before(self, call: Call) -> None:
        if call.target.resource == "secrets" and call.verb in ("get", "list", "watch"):
            self._note(call, "reads Secrets")
        if not call.is_write:
            return
        self._is_signed(call)
        self._deletes_what_it_saw(call)
        self._leaves_the_users_object_alone(call)
        if not call.is_lease:
            self._is_leader(call)

    def _is_signed(self, call: Call) -> None:
        """An unknown manager owns fields that nobody ever takes back."""
        manager = call.query.get("fieldManager", "")
        if call.verb not in ("delete", "deletecollection") and manager != "foveal-operator":
            self._note(call, f"writes as field manager {manager!r}")

    def _deletes_what_it_saw(self, call: Call) -> None:
        """Without a uid the object deleted may be the next one of that name."""
        if call.verb == "deletecollection":
            self._note(call, "deletes a whole collection")
        if call.verb == "delete" and not call.body.get("preconditions", {}).get("uid"):
            self._note(call, "deletes without a uid as precondition")

    def _leaves_the_users_object_alone(self, call: Call) -> None:
        """Anything but status drifts from what lies in Git."""
        if call.target.resource == RESOURCE and call.target.sub != "status":
            self._note(call, "writes the user's object")

    def _is_leader(self, call: Call) -> None:
        """Two writers undo each other. A lease that ran out counts as lost."""
        if not self._needs_lease:
            return
        if call.client != self._holder:
            self._note(call, f"writes while the lease is {self._holder or 'nobody'}'s")
        elif self._now() > self._lease_until:
            self._note(call, f"writes {self._now() - self._lease_until:.1f} s after its lease")

    # --- when the API server has answered ------------------------------------------------------
    def after(self, call: Call, status: int, reply: Obj) -> None:
        """`reply` is the stored object after a successful write."""
        if status >= 300:
            return
        if call.is_lease:
            self._remember_lease(call, reply)
            return
        self._has_a_cause(call, reply)
        if call.verb == "delete":
            for (namespace, _), names in self._engine_sets.items():
                if call.target.resource == "statefulsets" and namespace == call.target.namespace:
                    names.discard(call.target.name)
            return
        if call.target.resource == "statefulsets" and not call.target.sub:
            self._has_one_set_of_engines(call, reply)
            self._asks_for_no_more_devices(call, reply)

    def unanswered(self, call: Call) -> None:
        """The client does not know whether it worked: the next try is no repetition."""
        self._last.pop((call.client, str(call.target)), None)

    def _remember_lease(self, call: Call, lease: Obj) -> None:
        spec = lease.get("spec", {})
        if not spec.get("holderIdentity"):
            if call.client == self._holder:
                self._holder = ""
            return
        self._holder = call.client
        self._lease_until = self._now() + spec.get("leaseDurationSeconds", 15)

    def _has_a_cause(self, call: Call, reply: Obj) -> None:
        """The same write again, while nobody changed the object: a loop in the making."""
        if call.verb != "apply":
            return
        version = reply.get("metadata", {}).get("resourceVersion", "")
        mine = (call.client, str(call.target))
        this = (json.dumps(call.body, sort_keys=True), version)
        if self._last.get(mine) == this:
            self._note(call, f"repeats a write that changed nothing (version {version})")
        self._last[mine] = this

    def _has_one_set_of_engines(self, call: Call, reply: Obj) -> None:
        """Two sets of one resource have two engines of the same rank."""
        owner = self._engines_of(reply)
        if owner is None:
            return
        names = self._engine_sets.setdefault(owner, set())
        names.add(call.target.name)
        if len(names) > 1:
            self._note(call, f"makes a second set of engines of {owner}: {sorted(names)}")

    def _asks_for_no_more_devices(self, call: Call, reply: Obj) -> None:
        """Devices are what users pay for."""
        owner = self._engines_of(reply)
        if owner is None or self._num_devices is None:
            return
        wanted = int(reply["spec"].get("replicas", 1)) * devices_of(reply["spec"]["template"])
        allowed = self._num_devices(*owner)
        if wanted > allowed:
            self._note(call, f"asks for {wanted} devices, {allowed} are meant")

    def _engines_of(self, reply: Obj) -> tuple[str, str] | None:
        metadata = reply.get("metadata", {})
        labels = metadata.get("labels", {})
        if labels.get(ENGINE[0]) != ENGINE[1]:
            return None
        return metadata["namespace"], labels.get(INSTANCE, "")

    def _note(self, call: Call, what: str) -> None:
        at = datetime.now().strftime("%H:%M:%S.%f")[:-3]
        self.violations.append(f"{at} call {call.number} {call} {what}")


def devices_of(template: Obj) -> int:
    """Extended resources that one pod of a template asks for."""
    limits = [c.get("resources", {}).get("limits", {}) for c in template["spec"]["containers"]]
    return sum(int(n) for one in limits for key, n in one.items() if "/" in key)
