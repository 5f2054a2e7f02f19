"""`foveal plan --server`: changes that applying a resource would make in the cluster.

Called by command.py when --server is given.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import msgspec

from foveal_operator.api.parse import SpecError, parse, transition_problems
from foveal_operator.cli.cluster_flags import Connect, connect, inferences_path
from foveal_operator.cli.inputs import invalid, read_profile, read_resource_object
from foveal_operator.cli.output.terminal import style_of
from foveal_operator.cli.plan.render import desired_yaml
from foveal_operator.cli.plan.server_diff import ServerDiff, diff_json, diff_text, server_diff
from foveal_operator.cli.plan.server_plan import (
    look_as_operator,
    merged,
    operator_settings,
    taken_names,
)
from foveal_operator.common.errors import (
    EXIT_MISFIT,
    EXIT_NO,
    EXIT_OK,
    ClusterAnswerError,
    UsageError,
)
from foveal_operator.kube.kinds import BY_NAME
from foveal_operator.kube.reader import Reader
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.reconcile.decide import Decision
from foveal_operator.reconcile.prune import unwanted_in_the_end


def run(arguments: argparse.Namespace, open_cluster: Connect = connect) -> int:
    """Returns 0 when nothing would change, 1 when something would, 3 when it does not fit. Raises
    UsageError and ClusterAnswerError."""
    body = read_resource_object(arguments.filename)
    arguments.namespace = arguments.namespace or body["metadata"].get("namespace") or ""
    reader = open_cluster(arguments)
    body = {**body, "metadata": {**body["metadata"], "namespace": reader.namespace}}
    live = _live(reader, body["metadata"]["name"])
    resource = merged(body, live)
    _check(arguments.filename, resource, live)
    found_settings = operator_settings(reader)
    settings, note = found_settings.settings, found_settings.note
    if arguments.image:
        settings, note = msgspec.structs.replace(settings, runtime_image=arguments.image), ""
    profile = read_profile(arguments.profile) if arguments.profile else None
    nodes = NodeFacts(node_bytes=arguments.node_memory, device_bytes=arguments.device_memory)
    try:
        work, caches = asyncio.run(
            look_as_operator(reader, resource, settings, profile=profile, nodes=nodes)
        )
    except SpecError as error:
        raise invalid(arguments.filename, error) from error
    if work.inference.spec.paused:
        print("foveal: note: paused: the operator changes none of this until it is not",
              file=sys.stderr)  # fmt: skip
    if note and (live is None or not found_settings.concerns_new_only):
        print(f"foveal: note: {note}", file=sys.stderr)
    if work.plan is None:
        raise UsageError(f"{work.key[1]} has no profile in the cluster yet: give --profile")
    if not work.plan.fits:
        for problem in work.plan.problems:
            print(f"foveal: {problem.reason}: {problem.message}", file=sys.stderr)
        return EXIT_MISFIT
    namespace = work.key[0]
    gone = unwanted_in_the_end(work, caches)
    found = server_diff(
        work.desired,
        lambda kind, name: caches.get(BY_NAME[kind], namespace, name),
        {"engine": work.engine_pods, "frontend": work.frontend_pods},
        tuple((kind.name, body["metadata"]["name"]) for kind, body in gone),
        work.rollout.strategy or work.rollout.message,
        tuple(owned.body for owned in work.model.objects if owned.body["kind"] == "Job"),
        taken_names(reader, work, caches),
    )
    _show(arguments.output, work, found, reader)
    return EXIT_OK if found.is_empty else EXIT_NO


def _live(reader: Reader, name: str) -> Obj | None:
    """The resource as it is; None when it is new."""
    found = reader.get(inferences_path(reader.namespace, name))
    if found is None and reader.get(inferences_path(reader.namespace)) is None:
        raise ClusterAnswerError("the cluster does not know the resource: install Foveal's chart")
    return found


def _check(filename: str, resource: Obj, live: Obj | None) -> None:
    """What the API server would refuse to change. Raises UsageError."""
    if live is None:
        return
    try:
        problems = transition_problems(parse(resource).spec, parse(live).spec)
    except SpecError:
        return  # what lies there is an older release's; the API server decides
    if problems:
        raise invalid(filename, SpecError(problems))


def _show(output: str, work: Decision, found: ServerDiff, reader: Reader) -> None:
    if output == "yaml":
        sys.stdout.write(desired_yaml(work.desired))
    elif output == "json":
        sys.stdout.write(diff_json(found))
    else:
        title = f"{work.key[1]} in {work.key[0]}, against {reader.server}"
        sys.stdout.write(diff_text(title, found, style_of(sys.stdout)))
