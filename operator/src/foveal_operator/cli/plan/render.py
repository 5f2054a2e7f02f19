"""Text of objects and plans: YAML that the API server takes back, JSON for programs, a table for
people.

Called by the CLI and by tests; the same objects give the same text on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import yaml

from foveal_operator.api.parse import InferenceSpec
from foveal_operator.cli.terminal import Style, columns, tailed, wrapped
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import Desired
from foveal_runtime.plan.budget.types import BudgetPlan, Line, PlaceBudget
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import format_gib


class _Dumper(yaml.SafeDumper):
    """Block text for documents, no anchors: a reader can apply any part by hand."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def yaml_documents(objects: Iterable[Obj]) -> str:
    """One document each, in the order of application."""
    return "".join(
        "---\n" + yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=100) for body in objects
    )


def desired_yaml(desired: Desired) -> str:
    """What the operator applies. Secrets are created once with fresh keys, so only named here."""
    head = "".join(
        f"# {owned.body['kind']} {owned.body['metadata']['name']}: created once by the operator, "
        "with fresh keys\n"
        for owned in desired.objects
        if owned.policy == "CreateOnly"
    )
    return head + yaml_documents(
        owned.body for owned in desired.objects if owned.policy != "CreateOnly"
    )


def plan_json(plan: BudgetPlan, desired: Desired) -> str:
    """The whole result for programs; stable keys."""
    body = {
        "fits": plan.fits,
        "problems": [
            {**msgspec.to_builtins(problem), "message": problem.message}
            for problem in plan.problems
        ],
        "notes": list(plan.notes),
        "missingApis": list(desired.missing_apis),
        "budgets": {place.place: msgspec.to_builtins(place) for place in plan.places},
        "objects": [{"policy": owned.policy, "object": owned.body} for owned in desired.objects],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"


_TITLE = {"frontend": "Frontend pod", "engine": "Engine pod", "device": "Device of an engine"}


def plan_table(
    inference: InferenceSpec,
    profile: ModelProfile,
    plan: BudgetPlan,
    desired: Desired,
    style: Style,
) -> str:
    """Budgets by place, then notes and problems, then the objects."""
    lines = [style.bold(f"{inference.name} in {inference.namespace}")]
    lines += wrapped(_model(inference, profile), style, "")
    for place in plan.places:
        lines += ["", *_place(place, inference, style)]
    if plan.kv_tokens:
        lines += ["", *wrapped(_capacity(plan), style, "")]
    notes = [
        *plan.notes,
        *(
            f"{kind} is asked for and the cluster does not serve it"
            for kind in desired.missing_apis
        ),
    ]
    for note in notes:
        lines += wrapped(f"note: {note}", style, "")
    lines += ["", *_verdict(plan, style), "", *_objects(desired, style)]
    return "\n".join(lines) + "\n"


def _model(inference: InferenceSpec, profile: ModelProfile) -> str:
    dtype = inference.spec.caches.kv.dtype
    kib = profile.kv_token_bytes(dtype) / 1024
    windowed = profile.window_token_bytes(dtype) / 1024
    part = f", {windowed:.1f} of them within {profile.window} tokens" if windowed else ""
    return (
        f"{inference.spec.model.uri}: {format_gib(profile.weight_bytes)} of weights, "
        f"{kib:.1f} KiB of KV a token{part} ({profile.source})"
    )


def _place(place: PlaceBudget, inference: InferenceSpec, style: Style) -> Iterator[str]:
    replicas = {
        "frontend": inference.num_frontends,
        "engine": inference.num_engines,
        "device": inference.spec.engine.num_devices,
    }[place.place]
    times = "" if replicas == 1 else f"  x {replicas}"
    is_known = place.limit_bytes > 0  # of a device only nodes know it, where the resource does not
    limit = f"{format_gib(place.limit_bytes)}, {place.source}" if is_known else "unknown"
    yield style.bold(f"{_TITLE[place.place]}  limit {limit}{times}")
    for line in place.lines:
        if line.bytes or line.is_cache:
            yield from _row(line, place, style)
    if is_known:
        bar = _bar(place.headroom_bytes, place.limit_bytes, style)
        yield f"  {'headroom':<13} {format_gib(place.headroom_bytes):>13}  {bar}"


def _row(line: Line, place: PlaceBudget, style: Style) -> list[str]:
    each = f" ({line.count} x {format_gib(line.each_bytes)})" if line.count > 1 else ""
    count = f" [{line.num_items} {line.unit}]" if line.unit and line.num_items else ""
    bar = _bar(line.bytes, place.limit_bytes, style)
    head = f"  {line.name:<13} {format_gib(line.bytes):>13}  {bar}{line.source:<8}  "
    return tailed(head, f"{line.formula}{each}{count}", style)


def _bar(part: int, whole: int, style: Style) -> str:
    bar = style.bar(part, whole)
    return f"{bar}  " if bar else ""


def _capacity(plan: BudgetPlan) -> str:
    requests = plan.kv_tokens / plan.max_model_len
    return (
        f"An engine holds {plan.kv_tokens:,} tokens: {requests:.1f} requests of "
        f"{plan.max_model_len:,}, and {plan.encoder_embeds:,} encoder outputs."
    )


def _verdict(plan: BudgetPlan, style: Style) -> Iterator[str]:
    if plan.fits:
        yield style.paint("Fits.", "bold", "green")
        return
    yield style.paint("Does not fit: no pods would be made.", "bold", "red")
    for problem in plan.problems:
        yield from wrapped(f"{problem.reason}: {problem.message}", style, "  ")


def _objects(desired: Desired, style: Style) -> Iterator[str]:
    how = {"Apply": "", "CreateOnly": "created once", "Retain": "kept when the resource goes"}
    yield style.bold("Objects" if desired.complete else "Objects before any pod")
    rows = [(owned.key[0], owned.key[2], how[owned.policy]) for owned in desired.objects]
    yield from (style.clip(f"  {line}") for line in columns(rows))
