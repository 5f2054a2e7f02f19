"""Replacement of engine pods, one step: the pods to delete now, and the replica count. Pure.

The StatefulSet is OnDelete: it makes pods from the template it has, and only a deleted pod changes.
So a rollout is a choice of pods to delete, one step after the other, and a rollback is the same
with another template.
"""

from __future__ import annotations

import msgspec

from foveal_operator.rollout.pods import Pod


class EngineStep(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with engines."""

    replicas: int
    delete: tuple[Pod, ...] = ()


def engine_step(
    engines: tuple[Pod, ...],
    revision: str,
    *,
    num_engines: int,
    num_applied: int,
    strategy: str,
    num_surge: int,
    max_unavailable: int,
) -> EngineStep:
    """The next step towards `num_engines` serving engines of `revision`.

    Args:
        num_applied: spec.replicas of the live StatefulSet.
    """
    live = [pod for pod in engines if not pod.is_terminating and pod.ordinal < num_applied]
    old = [pod for pod in live if pod.revision != revision]
    new = [pod for pod in live if pod.revision == revision and pod.serves]
    replicas = num_engines
    if strategy == "Surge" and num_engines > 0:
        has_old = any(pod.ordinal < num_engines for pod in old)
        num_new = sum(1 for pod in new if pod.ordinal < num_engines)
        surged = num_applied > num_engines and num_new < num_engines
        if has_old or surged:
            replicas = num_engines + num_surge
    if strategy in ("", "OnDelete") or not old:
        return EngineStep(replicas=replicas)
    # Neither an untouched old engine nor a serving new one: on its way, or stuck.
    num_in_flight = num_applied - len(old) - len(new)
    num_serving = len(new) + sum(1 for pod in old if pod.serves)
    if num_serving == 0 and any(pod.is_hopeless for pod in old):
        # No service to protect: what can never serve need not go one by one.
        hopeless = tuple(pod for pod in old if pod.is_hopeless)
        return EngineStep(replicas=replicas, delete=hopeless)
    if strategy == "Surge":
        slots, floor = num_surge - num_in_flight, num_engines
    else:
        slots, floor = max_unavailable - num_in_flight, num_engines - max_unavailable
    chosen: list[Pod] = []
    for pod in _order(old, num_engines):
        if len(chosen) >= slots:
            break
        if pod.serves:
            if num_serving - 1 < floor:
                break
            num_serving -= 1
        chosen.append(pod)
    return EngineStep(replicas=replicas, delete=tuple(chosen))


def _order(old: list[Pod], num_engines: int) -> list[Pod]:
    """Those that serve nothing first, then idle ones. An extra engine that serves goes last, by
    the number of replicas."""
    found = [pod for pod in old if pod.ordinal < num_engines or not pod.serves]
    return sorted(found, key=lambda pod: (pod.serves, pod.load, -pod.ordinal))
