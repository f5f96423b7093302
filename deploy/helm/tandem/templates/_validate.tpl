{{- /* What a schema cannot say. Each message begins with the key that is wrong. */ -}}
{{- define "tandem.validate" -}}
{{- $roles := list -}}
{{- $pools := fromJson (include "tandem.pools" .) -}}
{{- $automatic := list "auto" "shm" "tcp" "grpc" "cuda_ipc" -}}
{{- $transports := list -}}
{{- range $name, $pool := $pools -}}
{{- $roles = append $roles $pool.role -}}
{{- $worker := deepCopy $.Values.config.worker -}}
{{- include "tandem.overlay" (list $worker $pool.settings) -}}
{{- if and (eq $.Values.backend "kubernetes") (not (has ($worker.transport | default "auto") $automatic)) (not $worker.transports) -}}
{{- fail (printf "pools.%s.settings.transport is %s: name in config.worker.transports all that workers listen on" $name $worker.transport) -}}
{{- end -}}
{{- with $pool.autoscaling -}}
{{- if and (ne .kind "none") (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "pools.%s.autoscaling.minReplicas is above maxReplicas" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (or (has "mixed" $roles) (and (has "prefill" $roles) (has "decode" $roles))) -}}
{{- fail "pools: nobody could answer. Have one with role prefill and one with role decode, or one with role mixed" -}}
{{- end -}}
{{- $isRay := eq .Values.backend "kuberay" -}}
{{- if or $isRay .Values.controller.enabled -}}
{{- range $role := list "prefill" "decode" "mixed" -}}
{{- $many := 0 -}}
{{- range $roles -}}{{- if eq . $role -}}{{- $many = add $many 1 -}}{{- end -}}{{- end -}}
{{- if gt (int $many) 1 -}}
{{- fail (printf "pools: two have the role %s, and with %s a role has one" $role ($isRay | ternary "backend kuberay" "controller.enabled")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $isRay -}}
{{- range $name, $pool := $pools -}}
{{- with $.Values.kuberay.scaling -}}
{{- if and .enabled (gt (int $pool.replicas) (int .maxReplicas)) -}}
{{- fail (printf "pools.%s.replicas is above kuberay.scaling.maxReplicas" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (not $pool.settings.threads) (not (regexMatch "^[0-9]+$" (toString $pool.resources.requests.cpu))) -}}
{{- fail (printf "pools.%s.resources.requests.cpu is no whole number: give settings.threads, or such a one" $name) -}}
{{- end -}}
{{- range $key, $value := $pool.settings -}}
{{- if not (has $key (list "block_tokens" "kv_dtype" "kv_memory_bytes" "threads" "transport")) -}}
{{- fail (printf "pools.%s.settings.%s: with backend kuberay a role cannot have its own; set config.worker.%s" $name $key $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (include "tandem.hasHubModel" .) (eq .Values.model.volume.kind "emptyDir") -}}
{{- fail "model.volume.kind is emptyDir: with backend kuberay the model is fetched once, so the volume must be shared" -}}
{{- end -}}
{{- end -}}
{{- with .Values.router.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail "router.autoscaling.minReplicas is above maxReplicas" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.model.path (eq .Values.model.volume.kind "none") -}}
{{- fail "model.volume.kind is none: a model that is not the bundled one needs a volume" -}}
{{- end -}}
{{- if and (hasPrefix "/" .Values.model.path) (not (hasPrefix "/models/" .Values.model.path)) -}}
{{- fail "model.path: the volume is mounted at /models, so a folder begins with /models/" -}}
{{- end -}}
{{- if and (hasPrefix "/" .Values.model.path) (eq .Values.model.volume.kind "emptyDir") -}}
{{- fail "model.volume.kind is emptyDir: a folder would not be there; name a hub id in model.path, or another volume" -}}
{{- end -}}
{{- if and .Values.model.revision (not (include "tandem.hasHubModel" .)) -}}
{{- fail "model.revision: only hub models have one" -}}
{{- end -}}
{{- with .Values.config.admission.default_slo -}}
{{- if not (hasKey $.Values.config.slo .) -}}
{{- fail (printf "config.admission.default_slo is %q: there is no config.slo.%s" . .) -}}
{{- end -}}
{{- end -}}
{{- range $name, $secret := .Values.tracing -}}
{{- if and $secret.existingSecret (not $.Values.config.tracing.endpoint) -}}
{{- fail (printf "tracing.%s.existingSecret: there is no config.tracing.endpoint to send traces to" $name) -}}
{{- end -}}
{{- end -}}
{{- with .Values.metrics.serviceMonitor -}}
{{- if and .enabled (not $.Values.auth.disabled) (not .token.existingSecret) -}}
{{- fail "metrics.serviceMonitor.token.existingSecret: /metrics wants an API key of the scope metrics" -}}
{{- end -}}
{{- end -}}
{{- end }}
