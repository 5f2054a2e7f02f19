"""Text of objects and plans: YAML that the API server takes back, JSON for programs.

Called by the CLI and by tests; the same objects give the same text on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import yaml

from foveal_operator.kube.types import Obj
from foveal_operator.manifests import Desired
from foveal_runtime.plan.budget.types import BudgetPlan


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
