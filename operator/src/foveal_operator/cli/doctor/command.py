"""`foveal doctor`: checks the cluster and this machine for problems."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import msgspec

from foveal_operator.cli.cluster_flags import (
    OUTPUTS,
    Connect,
    add_cluster_flags,
    connect,
    formatted,
)
from foveal_operator.cli.doctor.cluster_checks import (
    api_findings,
    clock_findings,
    definition_findings,
    device_findings,
    guarded,
    namespace_findings,
    node_findings,
    operator_findings,
    rights_findings,
    storage_findings,
    version_findings,
)
from foveal_operator.cli.doctor.local_checks import local_findings, runtime_findings
from foveal_operator.cli.doctor.report import Finding, fail, report_text, warn
from foveal_operator.cli.help import Help
from foveal_operator.cli.output.terminal import style_of
from foveal_operator.common.errors import EXIT_NO, EXIT_OK, ClusterAnswerError
from foveal_operator.kube.reader import NotConfiguredError, Reader
from foveal_runtime.plan import machine

_EPILOG = """\
Reads only. Each line is ok, warn (degraded, or unknown) or fail (nothing runs until it
is fixed); each warning and failure names a next step.

exit codes: 0 no check fails, 1 a check fails
"""
_CHECKS = (
    ("api server", version_findings),
    ("clock", clock_findings),
    ("definition", definition_findings),
    ("operator", operator_findings),
    ("your rights", rights_findings),
    ("namespace", namespace_findings),
    ("nodes", node_findings),
    ("devices", device_findings),
    ("storage", storage_findings),
    ("apis", api_findings),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the cluster and this machine for problems",
        description="Checks the cluster, your rights in it, and this machine.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("-o", "--output", choices=OUTPUTS, default="table")
    parser.add_argument("--local", action="store_true", help="this machine only, no cluster")
    add_cluster_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, open_cluster: Connect = connect) -> int:
    findings = [] if arguments.local else list(_of_cluster(arguments, open_cluster))
    if arguments.local or not findings or findings[0].area == "cluster":
        findings += [*local_findings(machine.look()), *runtime_findings()]
    if arguments.output == "table":
        sys.stdout.write(report_text(findings, style_of(sys.stdout)))
    else:
        sys.stdout.write(formatted([msgspec.to_builtins(f) for f in findings], arguments.output))
    return EXIT_NO if any(finding.level == "fail" for finding in findings) else EXIT_OK


def _of_cluster(arguments: argparse.Namespace, open_cluster: Connect) -> Iterator[Finding]:
    """Stops at the first check that gets no answer at all."""
    try:
        reader = open_cluster(arguments)
    except NotConfiguredError as error:
        if arguments.kubeconfig or arguments.context:
            yield fail("cluster", str(error), "name a file and a context that exist")
        else:
            yield warn("cluster", "none is configured; this machine was checked instead", "set "
                       "KUBECONFIG or give --kubeconfig, to check one")  # fmt: skip
        return
    yield from cluster_findings(reader)


def cluster_findings(reader: Reader) -> Iterator[Finding]:
    """Every check, in order."""
    try:
        for area, check in _CHECKS:
            yield from guarded(area, check, reader)
    except ClusterAnswerError as error:
        yield fail("cluster", str(error), "check the kubeconfig's server, the network and the user")
