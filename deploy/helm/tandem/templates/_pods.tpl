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
  # The role is the one that the worker starts with, and no selector goes by it: a worker may take another one.
  tandem/role: {{ .place.role }}
  tandem/hardware: {{ .place.hardware | quote }}
  tandem/revision: {{ include "tandem.revision" .root | quote }}
  {{- end }}
  {{- with .place.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  tandem/config-digest: {{ .config | sha256sum | trunc 16 | quote }}
  {{- with .place.podAnnotations }}
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
      - secret:
          name: {{ $values.clusterSecret.existingSecret }}
          items:
            - key: {{ $values.clusterSecret.key }}
              path: cluster-secret
      {{- if not $values.redis.auth.disabled }}
      - secret:
          name: {{ $values.redis.auth.existingSecret }}
          items:
            - key: {{ $values.redis.auth.key }}
              path: redis-password
      {{- end }}
      {{- if and (eq .component "router") $values.auth.existingSecret }}
      - secret:
          name: {{ $values.auth.existingSecret }}
          items:
            - key: {{ $values.auth.key }}
              path: admin-key
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
    sizeLimit: 16Mi
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
- name: cache
  emptyDir:
    sizeLimit: 4Gi
{{- with $values.model.volume }}
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
