{{- define "foveal.name" -}}
{{- default "foveal-operator" .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "foveal.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if or (eq .Release.Name (include "foveal.name" .)) (eq .Release.Name "foveal") -}}
{{- include "foveal.name" . -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "foveal.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Of objects without a namespace: two releases of one name may live in two namespaces. */}}
{{- define "foveal.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "foveal.fullname" .) | trunc 120 | trimSuffix "-" -}}
{{- end -}}

{{- define "foveal.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "foveal.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change. */}}
{{- define "foveal.selector" -}}
app.kubernetes.io/name: {{ include "foveal.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "foveal.labels" -}}
{{ include "foveal.selector" . }}
app.kubernetes.io/component: operator
{{ include "foveal.sharedLabels" . }}
{{- end -}}

{{/* Of the pod of `helm test`: the operator's selectors must not find it. */}}
{{- define "foveal.testLabels" -}}
app.kubernetes.io/name: {{ include "foveal.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{ include "foveal.sharedLabels" . }}
{{- end -}}

{{- define "foveal.sharedLabels" -}}
app.kubernetes.io/part-of: foveal
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (replace "+" "_" .Chart.Version) }}
{{- include "foveal.addedLabels" .Values.commonLabels }}
{{- end -}}

{{/* Labels of the values, without those that are the chart's: selectors and NetworkPolicies go by them. */}}
{{- define "foveal.addedLabels" -}}
{{- range $key, $value := . -}}
{{- if not (regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|part-of|version|managed-by)|helm\\.sh/chart)$" $key) }}
{{ $key | quote }}: {{ $value | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of a pod, beside its chart's labels: call with (list . "foveal.labels"). Where commonLabels and podLabels
     name one label, podLabels count. */}}
{{- define "foveal.podLabels" -}}
{{- $own := fromYaml (include (index . 1) (index . 0)) -}}
{{- $added := fromYaml (include "foveal.addedLabels" (index . 0).Values.podLabels) -}}
{{- toYaml (merge $added $own) -}}
{{- end -}}

{{/* With labels that the values give one object: call with (list . dict). Those come before the others. */}}
{{- define "foveal.labelsWith" -}}
{{- toYaml (merge (dict) (index . 1) (fromYaml (include "foveal.labels" (index . 0)))) -}}
{{- end -}}

{{/* Annotations of an object: call with (list . dict). Nothing when there are none. */}}
{{- define "foveal.annotations" -}}
{{- $all := merge (dict) (index . 1) (default dict (index . 0).Values.commonAnnotations) -}}
{{- with $all -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* registry/repository:tag, or @digest: call with (list . image). */}}
{{- define "foveal.image" -}}
{{- $image := index . 1 -}}
{{- $name := $image.repository -}}
{{- if $image.registry -}}
{{- $name = printf "%s/%s" (trimSuffix "/" $image.registry) $name -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default (index . 0).Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Comma-separated namespaces that are watched; empty for all. */}}
{{- define "foveal.namespaces" -}}
{{- if eq .Values.rbac.scope "namespaced" -}}
{{- join "," (default (list .Release.Namespace) .Values.rbac.watchNamespaces) -}}
{{- end -}}
{{- end -}}

{{/* "true" where the operator gets a PodMonitor: asked for, or Auto in a cluster that has the API. */}}
{{- define "foveal.hasPodMonitor" -}}
{{- $metrics := .Values.metrics -}}
{{- if ne (toString $metrics.podMonitor.enabled) "Auto" -}}
{{- ternary "true" "" $metrics.podMonitor.enabled -}}
{{- else if not $metrics.serviceMonitor.enabled -}}
{{- ternary "true" "" (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor") -}}
{{- end -}}
{{- end -}}

{{/* What the restricted standard asks for stays where no values are (helm upgrade --reuse-values). */}}
{{- define "foveal.podSecurity" -}}
{{- $found := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- range $key, $value := .Values.podSecurityContext -}}
{{- $_ := set $found $key $value -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- define "foveal.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Names (OpenShift's DNS pods listen on 5353), and the API server. */}}
{{- define "foveal.egress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
    - port: 5353
      protocol: UDP
    - port: 5353
      protocol: TCP
- ports:
    {{- range .Values.networkPolicy.apiServerPorts }}
    - port: {{ . }}
      protocol: TCP
    {{- end }}
  {{- with .Values.networkPolicy.apiServerCidrs }}
  to:
    {{- range . }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  {{- end }}
{{- end -}}
