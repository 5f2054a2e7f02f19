"""The frontend Deployment to apply now: the desired one, or one that is held back. Pure.

A frontend talks only to engines of its session group. When the group changes, old frontends are
needed as long as old engines serve, and new ones are of no use before a new engine is up. One
Deployment can hold both: with minReadySeconds beyond any rollout new pods never count as available,
so maxUnavailable says exactly how many old pods go and maxSurge how many new ones come.
"""

from __future__ import annotations

from typing import Any

from foveal_operator.kube.types import Obj
from foveal_operator.rollout.pods import Pods, template_group
from foveal_operator.rollout.view import Body

HOLD_SECONDS = 30 * 24 * 3600


def is_held(deployment: Obj | None) -> bool:
    """Old and new pods stand side by side on purpose."""
    spec = (deployment or {}).get("spec", {})
    return int(spec.get("minReadySeconds", 0)) >= HOLD_SECONDS


def frontend_body(
    body: Body, live: Obj | None, pods: Pods, num_frontends: int, num_engines: int
) -> Body | None:
    """The Deployment to apply now; None = leave the live one as it is. What is held back follows
    from the live one and its pods, and is applied only if that is still the live one: a replica
    that took over with an old view brought the old template back, and restarted every frontend.

    Args:
        body: the Deployment with the template that is aimed at.
        num_engines: asked for. With none, no engine of the new group will ever come up to wait for.
    """
    group = template_group(body)
    strangers = any(pod.group != group for pod in (*pods.engines, *pods.frontends))
    if live is None or num_frontends == 0 or not strangers:
        return body
    # An engine that drains still streams: its frontends stay.
    old = sum(1 for e in pods.engines if e.group != group and (e.serves or e.is_terminating))
    new = sum(1 for e in pods.engines if e.group == group and e.is_ready)
    if new and old:
        return _on_live(_held(body, pods, num_frontends, new, old), live)
    if new or (not old and (template_group(live) == group or not num_engines)):
        return body
    if is_held(live) or template_group(live) == group:
        return None
    held = {**body, "spec": {**body["spec"], "template": live["spec"]["template"]}}
    return _on_live(held, live)


def _on_live(body: Body, live: Obj) -> Body:
    """Refused with a conflict unless the live one is the one that was looked at."""
    version = live["metadata"].get("resourceVersion")
    if not version:
        return body
    return {**body, "metadata": {**body["metadata"], "resourceVersion": version}}


def _held(body: Body, pods: Pods, num_frontends: int, new: int, old: int) -> Body:
    """Frontends of both groups in the ratio of their engines; none goes before its successor."""
    num_new = -(-num_frontends * new // (new + old))
    group = template_group(body)
    ready = sum(1 for pod in pods.frontends if pod.group == group and pod.is_ready)
    num_old = max(-(-num_frontends * old // (new + old)), num_frontends - ready)
    rolling: dict[str, Any] = {
        "maxSurge": num_new + num_old - num_frontends,
        "maxUnavailable": num_frontends - num_old,
    }
    spec = {
        **body["spec"],
        "minReadySeconds": HOLD_SECONDS,
        "progressDeadlineSeconds": HOLD_SECONDS + body["spec"]["progressDeadlineSeconds"],
        "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
    }
    return {**body, "spec": spec}
