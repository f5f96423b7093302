{{- /* TOML of a map. Helm's own toToml writes whole numbers with a point, which strict readers refuse. */ -}}
{{- define "tandem.toml" -}}
{{- $path := index . 0 -}}
{{- $map := index . 1 -}}
{{- range $key := keys $map | sortAlpha }}
{{- $value := get $map $key }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ $value | toJson }}
{{- end }}
{{- end }}
{{- range $key := keys $map | sortAlpha }}
{{- $value := get $map $key }}
{{- if kindIs "map" $value }}
{{- $name := regexMatch "^[A-Za-z0-9_-]+$" $key | ternary $key ($key | toJson) }}
{{- $below := empty $path | ternary $name (printf "%s.%s" $path $name) }}

[{{ $below }}]
{{- include "tandem.toml" (list $below $value) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What stands in the configuration of every process, as JSON. */ -}}
{{- define "tandem.sharedConfig" -}}
{{- $model := .Values.model -}}
{{- dict
  "name" (include "tandem.clusterName" .)
  "log_level" .Values.config.log_level
  "log_format" .Values.config.log_format
  "model" (dict
    "path" $model.path
    "revision" $model.revision
    "served_names" $model.servedNames
    "dtype" $model.dtype
    "quantize" $model.quantize
    "quantize_calibration" $model.quantizeCalibration
    "max_model_len" $model.maxModelLen
    "chat_template" $model.chatTemplate
    "tool_format" $model.toolFormat
    "reasoning_format" $model.reasoningFormat)
  "redis" (dict "url" (include "tandem.redisURL" .))
| toJson -}}
{{- end }}

{{- /* What a router and whoever starts one is set to, as JSON. */ -}}
{{- define "tandem.frontConfig" -}}
{{- $config := fromJson (include "tandem.sharedConfig" .) -}}
{{- $router := merge (dict
  "host" "0.0.0.0"
  "port" 8000
  "grpc_port" 8001
  "admin_port" 8002
  "anonymous" (.Values.auth.disabled | ternary "always" "never")) (deepCopy .Values.config.router) -}}
{{- if .Values.router.tls.existingSecret -}}
{{- $_ := set $router "tls_cert" "/etc/tandem/tls/tls.crt" -}}
{{- $_ := set $router "tls_key" "/etc/tandem/tls/tls.key" -}}
{{- end -}}
{{- $store := deepCopy .Values.config.store -}}
{{- if .Values.router.files.existingClaim -}}
{{- $_ := set $store "dir" "/var/lib/tandem/files" -}}
{{- end -}}
{{- $_ := set $config "worker" (deepCopy .Values.config.worker) -}}
{{- $_ := set $config "router" $router -}}
{{- $_ := set $config "store" $store -}}
{{- range $name := list "admission" "slo" "budget" "planner" "price" "tracing" -}}
{{- $_ := set $config $name (get $.Values.config $name) -}}
{{- end -}}
{{- toJson $config -}}
{{- end }}

{{- /* Of how many workers there are it says only which roles: whoever scales must not restart every pod. */ -}}
{{- define "tandem.routerConfig" -}}
{{- $config := fromJson (include "tandem.frontConfig" .) -}}
{{- $roles := dict "prefill" 0 "decode" 0 "mixed" 0 -}}
{{- range $name, $pool := fromJson (include "tandem.pools" .) -}}
{{- $_ := set $roles $pool.role 1 -}}
{{- end -}}
{{- $_ := set $config "pools" $roles -}}
{{- include "tandem.toml" (list "" $config) | trim -}}
{{- end }}

{{- /* Of the controller: one pool a role, with the numbers and what decides whether a worker can take another role. */ -}}
{{- define "tandem.controllerConfig" -}}
{{- $config := fromJson (include "tandem.frontConfig" .) -}}
{{- $counts := dict "prefill" 0 "decode" 0 "mixed" 0 -}}
{{- range $name, $pool := fromJson (include "tandem.pools" .) -}}
{{- $_ := set $counts $pool.role (eq $pool.autoscaling.kind "none" | ternary $pool.replicas (max 1 (int $pool.autoscaling.minReplicas))) -}}
{{- $_ := set $config $pool.role (dict "tp" $pool.tp "hardware" $pool.hardware) -}}
{{- end -}}
{{- $_ := set $config "pools" $counts -}}
{{- include "tandem.toml" (list "" $config) | trim -}}
{{- end }}

{{- /* Of `up` beside Ray's head: one pool a role, with what its workers do differently. */ -}}
{{- define "tandem.headConfig" -}}
{{- $config := fromJson (include "tandem.frontConfig" .) -}}
{{- $counts := dict "prefill" 0 "decode" 0 "mixed" 0 -}}
{{- range $name, $pool := fromJson (include "tandem.pools" .) -}}
{{- $_ := set $counts $pool.role $pool.replicas -}}
{{- $role := merge (dict
  "tp" $pool.tp
  "hardware" $pool.hardware
  "device" ($pool.gpu.enabled | ternary "cuda" "cpu")
  "threads" (include "tandem.threads" $pool | int)) (deepCopy $pool.settings) -}}
{{- $_ := set $config $pool.role $role -}}
{{- end -}}
{{- $_ := set $config "pools" $counts -}}
{{- $_ := set $config "launcher" "ray" -}}
{{- $ray := dict "place_timeout_s" .Values.kuberay.placeTimeoutSeconds -}}
{{- if .Values.kuberay.scaling.enabled -}}
{{- $raycluster := dict
  "name" (printf "%s-ray" (include "tandem.fullname" .))
  "namespace" .Release.Namespace
  "account" "/etc/tandem/kubernetes" -}}
{{- range $name, $pool := fromJson (include "tandem.pools" .) -}}
{{- $_ := set $raycluster $pool.role $name -}}
{{- end -}}
{{- $_ := set $ray "raycluster" $raycluster -}}
{{- end -}}
{{- $_ := set $config "ray" $ray -}}
{{- include "tandem.toml" (list "" $config) | trim -}}
{{- end }}

{{- /* Compute threads of a rank where nobody asks the pod. */ -}}
{{- define "tandem.threads" -}}
{{- if .settings.threads -}}
{{- .settings.threads -}}
{{- else -}}
{{- max 1 (div (int .resources.requests.cpu) .tp) -}}
{{- end -}}
{{- end }}

{{- define "tandem.poolConfig" -}}
{{- $pool := .pool -}}
{{- $config := fromJson (include "tandem.sharedConfig" .root) -}}
{{- $worker := deepCopy .root.Values.config.worker -}}
{{- include "tandem.overlay" (list $worker $pool.settings) -}}
{{- $_ := set $worker "tp" $pool.tp -}}
{{- $_ := set $worker "hardware" $pool.hardware -}}
{{- $_ := set $worker "device" ($pool.gpu.enabled | ternary "cuda" "cpu") -}}
{{- $_ := set $config "pools" (dict $pool.role 1) -}}
{{- $_ := set $config "worker" $worker -}}
{{- include "tandem.toml" (list "" $config) | trim -}}
{{- end }}

{{- /* Without the password, which stands in a file. */ -}}
{{- define "tandem.redisURL" -}}
{{- if eq .Values.redis.mode "internal" -}}
redis://{{ include "tandem.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- else -}}
{{- with .Values.redis.external -}}
{{- .tls | ternary "rediss" "redis" }}://{{ if .username }}{{ .username }}@{{ end }}{{ .host }}:{{ .port }}/{{ .database }}
{{- if and .tls .caSecret.existingSecret }}?ssl_ca_certs=/etc/tandem/secrets/redis-ca.crt{{ end }}
{{- end -}}
{{- end -}}
{{- end }}
