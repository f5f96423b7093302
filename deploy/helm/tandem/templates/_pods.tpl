{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- /* Where a pod goes: .place has the keys of values, .selector the labels of its equals. */ -}}
{{- define "tandem.placing" -}}
{{- with .place.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .place.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey }}
    maxSkew: {{ .maxSkew }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "tandem.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* No version of the chart: pods are replaced for what changes them alone. */ -}}
{{- define "tandem.podMetadata" -}}
labels:
  {{- include "tandem.selector" . | nindent 2 }}
  {{- if .pool }}
  tandem/hardware: {{ .place.hardware | quote }}
  {{- if eq .root.Values.backend "kubernetes" }}
  # The role is the one that the worker starts with, and no selector goes by it: a worker may take another one.
  tandem/role: {{ .place.role }}
  tandem/revision: {{ include "tandem.revision" .root | quote }}
  {{- end }}
  {{- end }}
  {{- with .place.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := deepCopy .place.podAnnotations }}
{{- if .config }}{{ $_ := set $annotations "tandem/config-digest" (.config | sha256sum | trunc 16) }}{{ end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tandem.podBasics" -}}
serviceAccountName: {{ include "tandem.fullname" .root }}-{{ .account | default .component }}
enableServiceLinks: false
securityContext:
  {{- include "tandem.podSecurity" . | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- include "tandem.placing" . }}
{{- end }}

{{- /* Flags that every process of Tandem takes here. */ -}}
{{- define "tandem.commonArgs" -}}
- --config
- /etc/tandem/config/{{ .file }}
- --name
- $(POD_NAME)
- --folder
- /run/tandem
- --cluster-secret
- /etc/tandem/secrets/cluster-secret
{{- if not .root.Values.redis.auth.disabled }}
- --redis-password
- /etc/tandem/secrets/redis-password
{{- end }}
{{- end }}

{{- /* Of a router, and of who starts one. */ -}}
{{- define "tandem.frontArgs" -}}
{{- if or .root.Values.auth.existingSecret (not .root.Values.auth.disabled) -}}
- --admin-key
- /etc/tandem/secrets/admin-key
{{ end -}}
{{- if .root.Values.tracing.headers.existingSecret -}}
- --otlp-headers
- /etc/tandem/secrets/otlp-headers
{{ end -}}
{{- if .root.Values.tracing.caSecret.existingSecret -}}
- --otlp-ca
- /etc/tandem/secrets/otlp-ca.crt
{{ end -}}
{{- end }}

{{- define "tandem.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: HOME
  value: /var/cache/tandem
{{- if include "tandem.hasHubModel" .root }}
- name: HF_HOME
  value: /models
{{- with .root.Values.model.hubToken.existingSecret }}
- name: HF_TOKEN_PATH
  value: /etc/tandem/secrets/hub-token
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.mounts" -}}
- name: config
  mountPath: /etc/tandem/config
  readOnly: true
- name: secrets
  mountPath: /etc/tandem/secrets
  readOnly: true
- name: run
  mountPath: /run/tandem
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/tandem
{{- if ne .root.Values.model.volume.kind "none" }}
- name: models
  mountPath: /models
  {{- if not (include "tandem.hasHubModel" .root) }}
  readOnly: true
  {{- end }}
{{- end }}
{{- end }}

{{- define "tandem.volumes" -}}
{{- $values := .root.Values -}}
- name: config
  configMap:
    name: {{ include "tandem.fullname" .root }}-config
    defaultMode: 0444
    items:
      - key: {{ .file }}
        path: {{ .file }}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      {{- $secret := fromJson (include "tandem.secret" (dict "root" .root "given" $values.clusterSecret "made" "cluster-secret")) }}
      - secret:
          name: {{ $secret.name }}
          items:
            - key: {{ $secret.key }}
              path: cluster-secret
      {{- if not $values.redis.auth.disabled }}
      {{- $secret := fromJson (include "tandem.secret" (dict "root" .root "given" $values.redis.auth "made" "redis-password")) }}
      - secret:
          name: {{ $secret.name }}
          items:
            - key: {{ $secret.key }}
              path: redis-password
      {{- end }}
      {{- if and (has .component (list "router" "head")) (or $values.auth.existingSecret (not $values.auth.disabled)) }}
      {{- $secret := fromJson (include "tandem.secret" (dict "root" .root "given" $values.auth "made" "admin-key")) }}
      - secret:
          name: {{ $secret.name }}
          items:
            - key: {{ $secret.key }}
              path: admin-key
      {{- end }}
      {{- if has .component (list "router" "head") }}
      {{- range $path, $secret := dict "otlp-headers" $values.tracing.headers "otlp-ca.crt" $values.tracing.caSecret }}
      {{- if $secret.existingSecret }}
      - secret:
          name: {{ $secret.existingSecret }}
          items:
            - key: {{ $secret.key }}
              path: {{ $path }}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- if eq .component "head" }}
      - secret:
          name: {{ $values.kuberay.token.existingSecret }}
          items:
            - key: auth_token
              path: ray-token
      {{- end }}
      {{- with $values.redis.external.caSecret }}
      {{- if and (eq $values.redis.mode "external") .existingSecret }}
      - secret:
          name: {{ .existingSecret }}
          items:
            - key: {{ .key }}
              path: redis-ca.crt
      {{- end }}
      {{- end }}
      {{- with $values.model.hubToken }}
      {{- if and (include "tandem.hasHubModel" $.root) .existingSecret }}
      - secret:
          name: {{ .existingSecret }}
          items:
            - key: {{ .key }}
              path: hub-token
      {{- end }}
      {{- end }}
- name: run
  emptyDir:
    medium: Memory
    sizeLimit: {{ eq .component "head" | ternary "256Mi" "16Mi" }}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
- name: cache
  emptyDir:
    sizeLimit: 4Gi
{{- include "tandem.modelVolume" .root }}
{{- end }}

{{- define "tandem.modelVolume" }}
{{- with $.Values.model.volume }}
{{- if ne .kind "none" }}
- name: models
  {{- if eq .kind "claim" }}
  persistentVolumeClaim:
    claimName: {{ .claim }}
  {{- else if eq .kind "hostPath" }}
  hostPath:
    path: {{ .hostPath }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ .sizeLimit }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Token and authority of the pod's account, where its own command looks for them and no other container. */ -}}
{{- define "tandem.accountVolume" -}}
- name: account
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap:
          name: kube-root-ca.crt
          items:
            - {key: ca.crt, path: ca.crt}
{{- end }}

{{- /* Of Ray's own containers. */ -}}
{{- define "tandem.rayMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/tandem
- name: shared-memory
  mountPath: /dev/shm
{{- end }}

{{- define "tandem.memoryVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 4Gi
- name: cache
  emptyDir:
    sizeLimit: 4Gi
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .size }}
{{- end }}

{{- define "tandem.rayProbes" -}}
startupProbe:
  {{- toYaml .check | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
readinessProbe:
  {{- toYaml .check | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
livenessProbe:
  {{- toYaml .check | nindent 2 }}
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 5
{{- end }}
