{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "tandem.clusterName" -}}
{{- .Values.clusterName | default (.Release.Name | replace "." "-" | trunc 40) -}}
{{- end }}

{{- /* What selectors go by: never changes for an object. */ -}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
tandem/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tandem.metadata" -}}
name: {{ printf "%s-%s" (include "tandem.fullname" .root) (.suffix | default .component) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- end }}

{{- define "tandem.image" -}}
{{- with .image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.tag }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Sets in the first of a list of two maps what the second has, at every level, also what is 0, false or "". */ -}}
{{- define "tandem.overlay" -}}
{{- $base := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $base $key)) -}}
{{- include "tandem.overlay" (list (get $base $key) $value) -}}
{{- else -}}
{{- $_ := set $base $key $value -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Every pool with its defaults, as JSON: {name: pool}. */ -}}
{{- define "tandem.pools" -}}
{{- $pools := dict -}}
{{- range $name, $given := .Values.pools -}}
{{- if $given -}}
{{- $pool := deepCopy $.Values.poolDefaults -}}
{{- $_ := set $pool "settings" dict -}}
{{- $_ := set $pool "autoscaling" (dict "kind" "none") -}}
{{- include "tandem.overlay" (list $pool $given) -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- end -}}
{{- toJson $pools -}}
{{- end }}

{{- /* What only workers of one revision share: change any of it and they no longer pair with those before. */ -}}
{{- define "tandem.revision" -}}
{{- if .Values.revision -}}
{{- .Values.revision -}}
{{- else -}}
{{- $parts := dict -}}
{{- range $name, $pool := fromJson (include "tandem.pools" .) -}}
{{- $_ := set $parts $name (pick $pool "role" "tp" "gpu" "settings") -}}
{{- end -}}
{{- $image := include "tandem.image" (dict "image" .Values.image.worker "tag" .Chart.AppVersion) -}}
{{- $model := omit .Values.model "volume" "hubToken" "servedNames" "chatTemplate" "toolFormat" "reasoningFormat" -}}
{{- list $image $model .Values.config.worker $parts | toJson | sha256sum | trunc 12 -}}
{{- end -}}
{{- end }}

{{- define "tandem.hasHubModel" -}}
{{- if and .Values.model.path (not (hasPrefix "/" .Values.model.path)) -}}yes{{- end -}}
{{- end }}

{{- /* Names of the Deployments whose scale the controller may write: not those that an autoscaler owns. */ -}}
{{- define "tandem.poolDeployments" -}}
{{- $names := list -}}
{{- range $name, $pool := fromJson (include "tandem.pools" .) -}}
{{- if eq $pool.autoscaling.kind "none" -}}
{{- $names = append $names (printf "%s-worker-%s" (include "tandem.fullname" $) $name) -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end }}

{{- /* Which pods have the API: routers of their own, or Ray's head with a router beside it. */ -}}
{{- define "tandem.front" -}}
{{- eq .Values.backend "kuberay" | ternary "head" "router" -}}
{{- end }}

{{- /* Keys of the Secret that the chart makes, as JSON: those that no other Secret is named for. */ -}}
{{- define "tandem.madeSecrets" -}}
{{- $made := dict -}}
{{- if not .Values.clusterSecret.existingSecret -}}{{- $_ := set $made "cluster-secret" true -}}{{- end -}}
{{- if not (or .Values.auth.disabled .Values.auth.existingSecret) -}}{{- $_ := set $made "admin-key" true -}}{{- end -}}
{{- if not (or .Values.redis.auth.disabled .Values.redis.auth.existingSecret) -}}{{- $_ := set $made "redis-password" true -}}{{- end -}}
{{- toJson $made -}}
{{- end }}

{{- /* Where one of these is, as JSON: {name, key}. A named Secret has keys of its own. */ -}}
{{- define "tandem.secret" -}}
{{- if .given.existingSecret -}}
{{- dict "name" .given.existingSecret "key" .given.key | toJson -}}
{{- else -}}
{{- dict "name" (printf "%s-secrets" (include "tandem.fullname" .root)) "key" .made | toJson -}}
{{- end -}}
{{- end }}
