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
{{- if and (not (has ($worker.transport | default "auto") $automatic)) (not $worker.transports) -}}
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
{{- with .Values.metrics.serviceMonitor -}}
{{- if and .enabled (not $.Values.auth.disabled) (not .token.existingSecret) -}}
{{- fail "metrics.serviceMonitor.token.existingSecret: /metrics wants an API key of the scope metrics" -}}
{{- end -}}
{{- end -}}
{{- end }}
