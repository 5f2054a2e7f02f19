"""`foveal plan --server`: changes that applying a resource would make in the cluster.

Called by command.py when --server is given. The cluster is read through the caller's rights into
the caches that the operator's Observer reads; what comes out is the Decision that a reconcile acts
on. Writing is impossible by construction: the cluster that it is given has no writes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

import msgspec

from foveal_operator.api.parse import SpecError, parse, transition_problems
from foveal_operator.cli.arguments import Connect, connect
from foveal_operator.cli.files import invalid, read_profile, read_resource_object
from foveal_operator.cli.plan.render import desired_yaml
from foveal_operator.cli.plan.server_diff import ServerDiff, diff_json, diff_text, server_diff
from foveal_operator.cli.terminal import style_of
from foveal_operator.common.clock import Clock
from foveal_operator.common.errors import (
    EXIT_MISFIT,
    EXIT_NO,
    EXIT_OK,
    ClusterAnswerError,
    UsageError,
)
from foveal_operator.kube.kinds import BY_NAME, CHILD_SELECTOR, INSTANCE, WATCHED, Kind
from foveal_operator.kube.reader import (
    OPERATOR_SELECTOR,
    ForbiddenError,
    Reader,
    inferences_path,
    list_inferences,
)
from foveal_operator.kube.store import Caches
from foveal_operator.kube.types import NamespacedName, Obj
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.observability import resource_dashboards, resource_rule_groups
from foveal_operator.pods.probes import PodReports
from foveal_operator.process import options
from foveal_operator.reconcile.apply import NameTaken, Owner, standing
from foveal_operator.reconcile.decide import Decider, Decision
from foveal_operator.reconcile.inventory import Inventory
from foveal_operator.reconcile.observe import Observer, Settings
from foveal_operator.reconcile.prune import unwanted_in_the_end
from foveal_runtime.plan.profile import ModelProfile


def run(arguments: argparse.Namespace, open_cluster: Connect = connect) -> int:
    """Returns 0 when nothing would change, 1 when something would, 3 when it does not fit. Raises
    UsageError and ClusterAnswerError."""
    body = read_resource_object(arguments.filename, arguments.namespace)
    arguments.namespace = body["metadata"].get("namespace") or ""
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
    if found is None:
        list_inferences(reader)  # raises where the cluster does not know the resource
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


PAGE = "500"


class ReadOnlyCluster:
    """`cluster.ClusterReader` with the rights of the caller of `foveal plan --server`."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Obj | None:
        return self._reader.get(kind.path(namespace, name))

    async def list_all(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> list[Obj]:
        """A kind that may not be listed, or is not served, has no objects that are known."""
        try:
            return list_objects(self._reader, kind, namespace, selector, fields)
        except ForbiddenError:
            return []

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[list[Obj]]:
        yield await self.list_all(kind, namespace, selector, fields)

    async def serves(self, kind: Kind) -> bool:
        listed = self._reader.get(kind.root) or {}
        return any(entry.get("name") == kind.plural for entry in listed.get("resources") or ())


def list_objects(
    reader: Reader, kind: Kind, namespace: str | None, selector: str, fields: str = ""
) -> list[Obj]:
    """All pages. Raises ClusterAnswerError."""
    query = {"limit": PAGE, **({"labelSelector": selector} if selector else {})}
    if fields:
        query["fieldSelector"] = fields
    found: list[Obj] = []
    while True:
        page = reader.get(kind.path(namespace), **query) or {}
        for item in page.get("items") or ():
            found.append({**item, "apiVersion": kind.api_version, "kind": kind.name})
        token = page.get("metadata", {}).get("continue")
        if not token:
            return found
        query = {**query, "continue": token}


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the operator that runs in the cluster, as far as they are known.

    Attributes:
        note: what the user must know of them, or "".
        concerns_new_only: the note is about resources that are not in the cluster yet.
    """

    settings: Settings
    note: str = ""
    concerns_new_only: bool = False


def operator_settings(reader: Reader) -> OperatorSettings:
    """Reads the operator's Deployment, which the caller may not be allowed to see."""
    unknown = OperatorSettings(
        settings=Settings(rule_groups=resource_rule_groups(), dashboards=resource_dashboards()),
        note="the operator's own settings are not known: give --image if this is a new resource",
        concerns_new_only=True,
    )
    try:
        listed = reader.get("/apis/apps/v1/deployments", labelSelector=OPERATOR_SELECTOR) or {}
    except ClusterAnswerError:
        return unknown
    for item in listed.get("items") or ():
        template = item.get("spec", {}).get("template", {})
        for container in template.get("spec", {}).get("containers") or ():
            command = [*(container.get("command") or ()), *(container.get("args") or ())]
            if any("foveal-operator" in word for word in command):
                return _settings(container, item.get("metadata", {}).get("namespace", ""))
    return unknown


def _settings(container: Obj, namespace: str) -> OperatorSettings:
    """From its flags; those that this release does not know are left out."""
    words = [str(word) for word in container.get("args") or ()]
    environment = {
        entry["name"]: str(entry["value"])
        for entry in container.get("env") or ()
        if "value" in entry
    }
    try:
        found, _ = options.parser(environment).parse_known_args(words)
    except SystemExit as error:
        raise ClusterAnswerError(
            f"the operator's flags cannot be read: {' '.join(words)}"
        ) from error
    settings = Settings(
        runtime_image=found.runtime_image,
        cluster_domain=found.cluster_domain,
        monitoring_namespace=found.monitoring_namespace,
        operator_namespace=namespace,
        rule_groups=resource_rule_groups(found.runbooks),
        dashboards=resource_dashboards(),
    )
    own = [flag for flag in ("rules", "dashboards") if getattr(found, flag)]
    if not own:
        return OperatorSettings(settings=settings)
    note = f"the operator has {' and '.join(own)} of its own; compared are the built-in"
    return OperatorSettings(settings=settings, note=note)


def merged(wanted: Obj, live: Obj | None) -> Obj:
    """The resource as it would lie in the cluster after `kubectl apply`."""
    if live is None:
        return wanted
    metadata = dict(live["metadata"])
    generation = int(metadata.get("generation", 0))
    if live.get("spec") != wanted["spec"]:
        metadata["generation"] = generation + 1
    return {**live, "metadata": metadata, "spec": wanted["spec"]}


async def look_as_operator(
    reader: Reader,
    resource: Obj,
    settings: Settings,
    *,
    profile: ModelProfile | None,
    nodes: NodeFacts | None,
) -> tuple[Decision, Caches]:
    """One pass over the resource, as far as its decisions. Raises SpecError, ClusterAnswerError.

    `profile` and `nodes` stand in for what the cluster does not tell; a profile that it holds and
    a basis that it has kept win.
    """
    metadata = resource["metadata"]
    key: NamespacedName = (metadata["namespace"], metadata["name"])
    clock, cluster = Clock(), ReadOnlyCluster(reader)
    inventory = Inventory(cluster, clock)
    await inventory.refresh()
    caches = _filled(reader, key, inventory.apis)
    observer = Observer(
        cluster,
        caches,
        inventory,
        clock=clock,
        settings=settings,
        observe_pods=_nobody_asked,
    )
    decider = Decider(caches, inventory)
    body = {**resource, "metadata": {"uid": "", **metadata}}
    work = await decider.decide(await observer.observe(key, body))
    known = work.model.profile or profile
    if known is not None and (work.plan is None or not work.facts.model_ready):
        basis = work.basis.nodes(work.context.image)
        facts = NodeFacts(
            node_bytes=basis.node_bytes or (nodes.node_bytes if nodes else 0),
            device_bytes=basis.device_bytes or (nodes.device_bytes if nodes else 0),
            largest_device_bytes=basis.largest_device_bytes,
            takes_snapshots=basis.takes_snapshots,
        )
        work = await decider.with_model(work, known, facts)
    return work, caches


def taken_names(reader: Reader, work: Decision, caches: Caches) -> dict[tuple[str, str], str]:
    """Objects that the operator would find with another owner: (kind, name) -> whose they are. What
    the caller may not read is left out."""
    found, owner = {}, Owner(work.key[1], work.uid)
    for owned in (*work.model.objects, *work.desired.objects):
        kind_name, *at = owned.key
        kind = BY_NAME[kind_name]
        if kind_name == "Job":
            continue  # named by what it does; the operator's look is whole
        retained = owned.policy == "Retain"
        # What is cached lacks the field managers, which tell whose a retained object is.
        live = caches.get(kind, *at) if kind.watched and not retained else None
        try:
            live = live or reader.get(kind.path(*at))
        except ForbiddenError:
            continue
        live = live and {**live, "kind": kind_name}
        whose = live and standing(live, owner, is_retained=retained)
        if live and (whose == "Foreign" or (whose == "Offered" and kind_name == "Secret")):
            taken = NameTaken(live)
            found[kind_name, at[1]] = f"{taken.reason.name}: {taken.reason.message(taken.message)}"
    return found


async def _nobody_asked(*_: Sequence[Obj]) -> PodReports:
    """Pods are not asked from here: their ports take only frontends and Prometheus."""
    return PodReports()


def _filled(reader: Reader, key: NamespacedName, apis: frozenset[str]) -> Caches:
    """What the operator's watches would have told about this resource."""
    caches = Caches(whole=True)
    namespace, name = key
    selector = f"{INSTANCE}={name}"
    for kind in WATCHED:
        if kind.optional and kind.name not in apis:
            continue
        narrowed = selector if kind.name == "Pod" else f"{CHILD_SELECTOR},{selector}"
        if kind.plural == "multimodalinferences":
            continue
        for body in list_objects(reader, kind, namespace, narrowed):
            caches.put(kind, body)
    return caches
