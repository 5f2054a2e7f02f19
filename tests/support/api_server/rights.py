"""What the operator may do and what it was seen to do, as sets of (group, resource, verb).

Used by test_role_is_minimal.py: the two are equal when the chart's roles are neither too small nor
too large.
"""

from __future__ import annotations

from collections.abc import Iterable

from foveal_operator.manifests import access
from tests.support.api_server.calls import Call
from tests.support.api_server.fault_proxy import FaultProxy

Right = tuple[str, str, str]
FINALIZERS = ("foveal.dev", "multimodalinferences/finalizers", "update")
_VERBS = {"apply": "patch"}


def granted() -> set[Right]:
    """By the rules that the chart's roles are generated from."""
    scopes: tuple[access.Scope, ...] = ("resources", "nodes", "lease")
    rules = [rule for scope in scopes for rule in access.rules(scope)]
    return {
        (rule.group, resource, verb)
        for rule in rules
        for resource in rule.resources
        for verb in rule.verbs
    }


def used(proxy: FaultProxy) -> set[Right]:
    """By every call that went through, and what the API server asks for beside it."""
    statuses = {call.number: status for call, status in proxy.writes}
    found = {_right(call) for call in _of_objects(proxy.calls)}
    for call in _of_objects(proxy.calls):
        if call.verb == "apply" and statuses.get(call.number) == 201:
            # An apply that finds nothing is authorized a second time, as a create.
            found.add((call.target.group, call.target.resource, "create"))
        if call.is_write and _blocks_deletion(call):
            found.add(FINALIZERS)
    return found


def _of_objects(calls: Iterable[Call]) -> list[Call]:
    """Not discovery, which everybody may do."""
    return [call for call in calls if call.target.resource]


def _right(call: Call) -> Right:
    target = call.target
    resource = f"{target.resource}/{target.sub}" if target.sub else target.resource
    return target.group, resource, _VERBS.get(call.verb, call.verb)


def _blocks_deletion(call: Call) -> bool:
    """Admission asks for update of finalizers before it takes such an owner."""
    owners = call.body.get("metadata", {}).get("ownerReferences") or ()
    return any(owner.get("blockOwnerDeletion") for owner in owners)
