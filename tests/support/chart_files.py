"""The chart's generated files: CustomResourceDefinition, roles, dashboards, the operator's rules.

Used by regenerate.py and by the test that compares.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from foveal_operator.api import crd
from foveal_operator.manifests import access
from foveal_operator.observability.alerts import operator_rule_groups
from tests.support import grafana

CHART = Path(__file__).parents[2] / "charts" / "foveal"
_NAME = "  name: multimodalinferences.foveal.dev\n"
_METADATA = """  name: multimodalinferences.foveal.dev
  labels:
    {{- include "foveal.labels" . | nindent 4 }}
  {{- $keep := ternary (dict "helm.sh/resource-policy" "keep") dict .Values.crds.keep }}
  {{- with include "foveal.annotations" (list . $keep) }}
  {{- . | nindent 2 }}
  {{- end }}
"""


def files() -> dict[str, str]:
    """Path within the chart to text."""
    boards = {f"files/dashboards/{name}": text for name, text in grafana.cluster_files().items()}
    return {
        "templates/crd.yaml": _crd(),
        "templates/_rules.tpl": _rules(),
        "files/rules.yaml": _operator_rules(),
        **boards,
    }


def _crd() -> str:
    text = crd.render()
    assert "{{" not in text
    assert text.count(_NAME) == 1
    head = "{{- /* Generated from crds/ by `make generate`. */ -}}\n"
    body = text.partition("\n")[2].replace(_NAME, _METADATA)
    return f"{head}{{{{- if .Values.crds.enabled }}}}\n{body}{{{{- end }}}}\n"


def _rules() -> str:
    parts = ["{{- /* Generated from foveal_operator.manifests.access by `make generate`. */ -}}\n"]
    for scope in ("resources", "nodes", "lease"):
        parts.append(f'{{{{- define "foveal.rules.{scope}" -}}}}\n')
        for rule in access.rules(scope):
            parts.append(f"- apiGroups: {json.dumps([rule.group])}\n")
            parts.append(f"  resources: {json.dumps(rule.resources)}\n")
            if rule.own_name:
                parts.append('  resourceNames: [{{ include "foveal.fullname" . | quote }}]\n')
            parts.append(f"  verbs: {json.dumps(rule.verbs)}\n")
        parts.append("{{- end -}}\n")
    return "".join(parts)


def _operator_rules() -> str:
    """Read by .Files.Get, not as a template: alert texts have templates of their own."""
    groups = {"groups": list(operator_rule_groups("@runbooks@"))}
    return yaml.safe_dump(groups, sort_keys=False, width=100)
