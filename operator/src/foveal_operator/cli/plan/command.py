"""`foveal plan`: every budget and every object of a resource, without a cluster or against one.

The same functions as the operator's, so what `-o yaml` prints is what it applies (less the owner
reference, which only a cluster can give).
"""

from __future__ import annotations

import argparse
import sys

from foveal_operator.api.parse import SpecError
from foveal_operator.cli.arguments import Commands, add_cluster_flags, add_command, size
from foveal_operator.cli.files import invalid, read_profile, read_resource
from foveal_operator.cli.plan.render import desired_yaml, plan_json, plan_table
from foveal_operator.cli.terminal import style_of
from foveal_operator.common.errors import UsageError
from foveal_operator.manifests import ClusterFacts, desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_operator.observability import resource_dashboards, resource_rule_groups
from foveal_runtime.plan.budget.planner import plan

OPTIONAL_APIS = (
    "HTTPRoute",
    "InferencePool",
    "PodMonitor",
    "PrometheusRule",
    "ResourceClaimTemplate",
    "ScaledObject",
)
_DESCRIPTION = """\
Derives every memory budget of a MultiModalInference and lists the objects the operator would own.
Needs no cluster: what nodes and devices offer is given here, or stands in the resource.

With --server it reads a cluster as the operator would and says what applying the resource would
change there: objects field by field, and which pods would restart and why. It writes nothing.
"""
_EPILOG = """\
examples:
  foveal plan -f mmi.yaml --profile profile.json --device-memory 80Gi
  foveal plan -f mmi.yaml --profile profile.json -o yaml | kubectl diff -f -
  foveal-runtime profile MODEL_DIRECTORY > profile.json     # makes one

  foveal plan -f mmi.yaml --server                          # what would change

exit codes: 0 fits (with --server: nothing would change), 1 something would change (--server), 2
wrong resource or arguments, 3 does not fit, 4 the cluster does not answer (--server)
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "plan", "budgets and objects of a resource, without a cluster",
                         run, _DESCRIPTION, _EPILOG)  # fmt: skip
    add = parser.add_argument
    add("-f", "--filename", required=True, metavar="FILE", help="the resource; - reads stdin")
    add("--profile", metavar="FILE", help="the model's costs, as JSON; --server finds its own")
    add("--server", action="store_true", help="compare with a cluster")
    add("--node-memory", type=size, default=0, metavar="SIZE", help="allocatable on a node")
    add("--device-memory", type=size, default=0, metavar="SIZE", help="memory of one device")
    add("--image", metavar="IMAGE", help="runtime image, unless the resource names one")
    add(
        "--api",
        action="append",
        default=[],
        metavar="KIND",
        choices=[*OPTIONAL_APIS, "all", "none"],
        help="optional API that the cluster serves, by its kind; repeat, or none (default: all)",
    )
    add("-o", "--output", choices=["table", "yaml", "json"], default="table")
    add_cluster_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan. Returns 0 when it fits, 3 when it does not. Raises UsageError."""
    if arguments.server:
        from foveal_operator.cli.plan import (
            server_command as cli_server,  # kopf and the operator, only where needed
        )

        return cli_server.run(arguments)
    for flag in ("context", "kubeconfig"):
        if getattr(arguments, flag):
            raise UsageError(f"--{flag} names a cluster, which only --server reads: add --server, "
                             "or leave it out")  # fmt: skip
    if not arguments.profile:
        raise UsageError("give --profile FILE, or --server to take it from a cluster")
    inference = read_resource(arguments.filename, arguments.namespace)
    profile = read_profile(arguments.profile)
    nodes = NodeFacts(node_bytes=arguments.node_memory, device_bytes=arguments.device_memory)
    result = plan(budget_inputs(inference, nodes), profile)
    facts = ClusterFacts(
        apis=_apis(arguments.api),
        rule_groups=resource_rule_groups(),
        dashboards=resource_dashboards(),
        **({"runtime_image": arguments.image} if arguments.image else {}),
    )
    try:
        objects = desired(inference, result, facts)
    except SpecError as error:
        raise invalid(arguments.filename, error) from error
    if arguments.output == "yaml":
        sys.stdout.write(desired_yaml(objects))
    elif arguments.output == "json":
        sys.stdout.write(plan_json(result, objects))
    else:
        sys.stdout.write(plan_table(inference, profile, result, objects, style_of(sys.stdout)))
    if not result.fits and arguments.output != "table":
        for problem in result.problems:
            print(f"foveal: {problem.reason}: {problem.message}", file=sys.stderr)
    return 0 if result.fits else 3


def _apis(chosen: list[str]) -> frozenset[str]:
    if not chosen or "all" in chosen:
        return frozenset(OPTIONAL_APIS)
    return frozenset(chosen) - {"none"}
