"""What a user does to a resource, step by step: the scenarios that the reliability tests disturb.

Each step changes the resource and tells by which state it is over. One undisturbed run gives the
children that must stand there after each step, whatever went wrong on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foveal_operator.kube.kinds import INSTANCE
from foveal_operator.kube.types import Obj
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import KIND, Sandbox

Children = dict[str, Obj]
_ROUTE = {"parentRefs": [{"name": "gateway", "namespace": "infra"}]}


@dataclass(frozen=True)
class Step:
    """`act` does it; `num_engines` and `num_frontends` are the pods that are there afterwards,
    `reason` is that of the condition Ready."""

    name: str
    act: Callable[[Sandbox], object]
    num_engines: int = 1
    num_frontends: int = 1
    reason: str = "Ready"


def _set(**changes: object) -> Callable[[Sandbox], object]:
    """The whole resource anew, with these fields."""
    return lambda sandbox: sandbox.apply(sandbox.sample("cpu", **changes))


_TWO = {"frontend__replicas": 2}
_IMAGE = {**_TWO, "image": "registry.example/foveal-runtime:next"}
_CACHE = {**_IMAGE, "caches__processor__size": "300Mi"}
_ADDED = {**_CACHE, "networking__httpRoute": _ROUTE}
STEPS = (
    Step("create", _set()),
    Step("scale", _set(**_TWO), num_frontends=2),
    Step("image", _set(**_IMAGE), num_frontends=2),
    Step("cache", _set(**_CACHE), num_frontends=2),
    # No gateway lives here to accept the route.
    Step("route added", _set(**_ADDED), num_frontends=2, reason="RoutePending"),
    Step("route removed", _set(**_CACHE), num_frontends=2),
    Step(
        "delete",
        lambda sandbox: sandbox.api.delete(KIND, sandbox.namespace, "qwen").must(),
        num_engines=0,
        num_frontends=0,
    ),
)


def is_over(sandbox: Sandbox, step: Step) -> bool:
    """All is ready and the operator says so; a deleted resource has left nothing."""
    if step.name == "delete":
        return not sandbox.children() and not sandbox.nodes.pods()
    if sandbox.conditions(field="reason").get("Ready") != step.reason:
        return False
    image = ((sandbox.resource() or {}).get("spec") or {}).get("image")
    pods = [*sandbox.nodes.pods("engine"), *sandbox.nodes.pods("frontend")]
    if image and any(image not in _images(pod) for pod in pods):
        return False
    return sandbox.nodes.are_ready("engine", step.num_engines) and sandbox.nodes.are_ready(
        "frontend", step.num_frontends
    )


def _images(pod: Obj) -> list[str]:
    return [container["image"] for container in pod["spec"]["containers"]]


# --- running them ----------------------------------------------------------------------------
NO_LEASE = "--leader-elect=false"
STEP_SECONDS = 240.0


def undisturbed(sandbox: Sandbox) -> dict[str, Children]:
    """The children after each step of a run in which nothing goes wrong."""
    sandbox.operator("a", NO_LEASE).start()
    return {step.name: run(sandbox, step) for step in STEPS}


def run(sandbox: Sandbox, step: Step) -> Children:
    """Does a step and waits until it is over and the operator rests. Returns the children."""
    step.act(sandbox)
    try:
        wait_until(
            f"step {step.name!r} is over",
            lambda: keep_alive(sandbox) and is_over(sandbox, step),
            STEP_SECONDS,
        )
        wait_until(
            "the operator rests", lambda: keep_alive(sandbox) and rests(sandbox), STEP_SECONDS
        )
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{sandbox.told()}") from None
    return sandbox.children()


def keep_alive(sandbox: Sandbox) -> bool:
    """A dead operator is started anew, as a kubelet would. True when it lived."""
    (operator,) = sandbox.operators
    if operator.is_alive:
        return True
    sandbox.proxy.audit.forget(operator.name)
    operator.start()
    return False


def rests(sandbox: Sandbox) -> bool:
    """One and the same life of it is ready and has written nothing for a while."""
    (operator,) = sandbox.operators
    if operator.ask("/readyz")[0] != 200:
        return False
    sandbox.settled()
    return operator.is_alive


def _pods(**spec: object) -> Obj:
    return {"spec": {"template": {"spec": spec}}}


DRIFT: list[tuple[str, str, Any]] = [
    ("Deployment", "qwen-frontend", {"spec": {"replicas": 5}}),
    ("Deployment", "qwen-frontend", _pods(terminationGracePeriodSeconds=999)),
    ("StatefulSet", "qwen-engine", _pods(automountServiceAccountToken=True)),
    ("Service", "qwen", {"spec": {"ports": [{"name": "http", "port": 1, "targetPort": 1}]}}),
    ("NetworkPolicy", "qwen-engine", {"spec": {"ingress": []}}),
    ("ServiceAccount", "qwen", {"automountServiceAccountToken": True}),
    ("ServiceAccount", "qwen", {"automountServiceAccountToken": None}),
    ("Deployment", "qwen-frontend", {"metadata": {"labels": {INSTANCE: "other"}}}),
    ("Service", "qwen", {"metadata": {"labels": {INSTANCE: None}}}),
]
"""Kind, name and change: what somebody else writes over fields that the operator sets."""
