"""The operator's flags; each has an environment variable, so that a chart can set either.

Read once by main.py. Nothing here touches the cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from foveal_operator.common.errors import UsageError
from foveal_operator.common.versions import installed_version
from foveal_operator.kube.lease import LeaseSettings
from foveal_operator.observability import resource_dashboards, resource_rule_groups
from foveal_operator.observability.alerts import RUNBOOKS
from foveal_operator.reconcile.observe import Settings

MAX_NAMESPACES = 256
_EPILOG = "Every flag can be given as FOVEAL_OPERATOR_<FLAG>, such as FOVEAL_OPERATOR_LOG_FORMAT."


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`namespaces` empty = the whole cluster; `bind_host` empty = every address of the pod."""

    namespaces: tuple[str, ...] = ()
    settings: Settings = Settings()
    lease: LeaseSettings | None = None
    identity: str = "foveal-operator"
    kubeconfig: str = ""
    context: str = ""
    bind_host: str = ""
    bind_port: int = 8080
    num_workers: int = 8
    resync_seconds: float = 600.0
    log_format: str = "json"
    log_level: str = "INFO"


def parser(environment: Mapping[str, str] = {}) -> argparse.ArgumentParser:
    """Flags with their defaults in words; what the environment gives takes a default's place."""
    found = argparse.ArgumentParser(
        prog="foveal-operator",
        description="Reconciles MultiModalInference resources.",
        epilog=_EPILOG,
    )
    add = found.add_argument
    add("--namespaces", default="", metavar="NAMES",
        help="namespaces to watch, with commas (default: all)")  # fmt: skip
    add("--runtime-image", default=Settings().runtime_image, metavar="IMAGE",
        help="image of pods whose resource names none (default: %(default)s)")  # fmt: skip
    add("--leader-elect", default="true", choices=["true", "false"],
        help="write only while holding a Lease (default: true)")  # fmt: skip
    add("--lease-namespace", default="", metavar="NAMESPACE",
        help="namespace of the Lease (default: POD_NAMESPACE, else default)")  # fmt: skip
    add("--lease-name", default="foveal-operator", metavar="NAME",
        help="name of the Lease (default: %(default)s)")  # fmt: skip
    add("--lease-seconds", type=float, default=15.0, metavar="SECONDS",
        help="time after which others may take the Lease (default: %(default)g)")  # fmt: skip
    add("--renew-seconds", type=float, default=10.0, metavar="SECONDS",
        help="time without renewal after which the holder ends (default: %(default)g)")  # fmt: skip
    add("--retry-seconds", type=float, default=1.5, metavar="SECONDS",
        help="time between two renewals (default: %(default)g)")  # fmt: skip
    add(
        "--resync-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time between two full reconciles of every resource (default: %(default)g)",
    )
    add("--workers", type=int, default=8, metavar="N",
        help="resources that are reconciled at a time (default: %(default)s)")  # fmt: skip
    add("--bind", default=":8080", metavar="[HOST]:PORT",
        help="address of /livez, /readyz and /metrics (default: %(default)s, all addresses, IPv4 "
        "and IPv6)")  # fmt: skip
    add("--cluster-domain", default="cluster.local", metavar="DOMAIN",
        help="DNS domain of the cluster (default: %(default)s)")  # fmt: skip
    add(
        "--monitoring-namespace",
        default="monitoring",
        metavar="NAMESPACE",
        help="namespace that NetworkPolicies let scrape engines (default: %(default)s)",
    )
    add("--runbooks", default=RUNBOOKS, metavar="URL",
        help="address of the runbooks that alerts link to (default: %(default)s)")  # fmt: skip
    add("--rules", default="", metavar="FILE",
        help="groups of the PrometheusRules, as YAML (default: built in)")  # fmt: skip
    add("--dashboards", default="", metavar="DIRECTORY",
        help="dashboards, *.json (default: built in)")  # fmt: skip
    add(
        "--kubeconfig",
        default="",
        metavar="FILE",
        help="how to reach the cluster (default: the pod's service account, else KUBECONFIG)",
    )
    add("--context", default="", metavar="NAME",
        help="context of the kubeconfig (default: its current one)")  # fmt: skip
    add("--log-format", default="json", choices=["json", "text"],
        help="format of the log on standard error (default: %(default)s)")  # fmt: skip
    add("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="least severe lines that are logged (default: %(default)s)")  # fmt: skip
    given = {
        action.dest: environment[name]
        for action in found._actions
        if (name := f"FOVEAL_OPERATOR_{action.dest.upper()}") in environment
    }
    found.set_defaults(**given)
    return found


def read(argv: list[str] | None, environment: Mapping[str, str] | None = None) -> Options:
    """Raises UsageError; argparse itself ends the process on unknown flags."""
    environment = os.environ if environment is None else environment
    flags = parser(environment)
    found = flags.parse_args(argv)
    for action in flags._actions:  # argparse takes any default, such as the environment's
        value = getattr(found, action.dest, "")
        if action.choices and value not in action.choices:
            name = action.option_strings[0]
            raise UsageError(f"{name} {value!r}: write one of {', '.join(action.choices)}")
    namespaces = tuple(dict.fromkeys(n.strip() for n in found.namespaces.split(",") if n.strip()))
    if len(namespaces) > MAX_NAMESPACES:
        raise UsageError(
            f"--namespaces names {len(namespaces)}; from {MAX_NAMESPACES} on watch all"
        )
    host, colon, port = found.bind.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--bind {found.bind!r} is neither HOST:PORT nor :PORT")
    if not 1 <= found.workers <= 256:
        raise UsageError(f"--workers {found.workers} is not between 1 and 256")
    if found.resync_seconds < 1:
        raise UsageError(f"--resync-seconds {found.resync_seconds:g} is below 1")
    identity = f"{environment.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    return Options(
        namespaces=namespaces,
        settings=Settings(
            runtime_image=found.runtime_image,
            cluster_domain=found.cluster_domain,
            monitoring_namespace=found.monitoring_namespace,
            operator_namespace=environment.get("POD_NAMESPACE", ""),
            version=installed_version("foveal-operator", ""),
            rule_groups=_rules(found.rules, found.runbooks),
            dashboards=_dashboards(found.dashboards),
        ),
        lease=_lease(found, environment, identity) if found.leader_elect == "true" else None,
        identity=identity,
        kubeconfig=found.kubeconfig,
        context=found.context,
        bind_host=host.strip("[]"),
        bind_port=int(port),
        num_workers=found.workers,
        resync_seconds=found.resync_seconds,
        log_format=found.log_format,
        log_level=found.log_level,
    )


def _lease(
    found: argparse.Namespace, environment: Mapping[str, str], identity: str
) -> LeaseSettings:
    settings = LeaseSettings(
        namespace=found.lease_namespace or environment.get("POD_NAMESPACE") or "default",
        name=found.lease_name,
        identity=identity,
        lease_seconds=found.lease_seconds,
        renew_seconds=found.renew_seconds,
        retry_seconds=found.retry_seconds,
    )
    try:
        settings.check()
    except ValueError as error:
        raise UsageError(str(error)) from error
    return settings


def _rules(path: str, runbooks: str) -> tuple[dict[str, Any], ...]:
    if not runbooks.startswith(("https://", "http://")):
        raise UsageError(f"--runbooks {runbooks!r} is not an absolute http or https URL")
    if not path:
        return resource_rule_groups(runbooks)
    try:
        body = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--rules {path}: {error}") from error
    groups = body.get("groups") if isinstance(body, dict) else None
    if not isinstance(groups, list):
        raise UsageError(f"--rules {path}: has no list `groups`")
    return tuple(groups)


def _dashboards(path: str) -> dict[str, str]:
    if not path:
        return resource_dashboards()
    found = {}
    try:
        for file in sorted(Path(path).glob("*.json")):
            found[file.name] = file.read_text(encoding="utf-8")
            json.loads(found[file.name])
    except (OSError, ValueError) as error:
        raise UsageError(f"--dashboards {path}: {error}") from error
    return found
