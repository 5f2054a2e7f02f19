"""Flags and helpers of the commands that read a cluster: kubectl's flags, one resource, formats."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import yaml

from foveal_operator.api.crd import GROUP, PLURAL, VERSION
from foveal_operator.common.errors import ClusterAnswerError
from foveal_operator.kube.reader import KubeReader, Reader
from foveal_operator.kube.types import Obj

OUTPUTS = ("table", "json", "yaml")
Connect = Callable[[argparse.Namespace], Reader]


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """The same names as kubectl's."""
    group = parser.add_argument_group("cluster")
    group.add_argument("-n", "--namespace", default="", metavar="NAME",
                       help="default: the context's")  # fmt: skip
    group.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig")
    group.add_argument("--kubeconfig", default="", metavar="FILE", help="default: $KUBECONFIG")


def connect(arguments: argparse.Namespace) -> Reader:
    """Raises NotConfiguredError."""
    return KubeReader(arguments.kubeconfig, arguments.context, arguments.namespace)


def inferences_path(namespace: str, name: str = "") -> str:
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
    return f"{path}/{name}" if name else path


def get_inference(reader: Reader, name: str) -> Obj:
    """Raises ClusterAnswerError when there is no such resource, saying which there are."""
    found = reader.get(inferences_path(reader.namespace, name))
    if found is not None:
        return found
    others = reader.get(inferences_path(reader.namespace))
    if others is None:
        raise ClusterAnswerError(
            f"the cluster does not know {PLURAL}.{GROUP}: install Foveal's chart first"
        )
    names = ", ".join(sorted(item["metadata"]["name"] for item in others.get("items", ())))
    raise ClusterAnswerError(
        f"there is no {PLURAL}.{GROUP} {name!r} in namespace {reader.namespace}; there is "
        f"{names or 'none'}"
    )


def formatted(value: Any, output: str) -> str:
    """JSON or YAML with a stable order."""
    if output == "json":
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)
