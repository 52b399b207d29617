{{- /* What several objects have in common. */ -}}

{{- define "quire.labels" -}}
app.kubernetes.io/part-of: quire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.pod" -}}
# Else a Service named quire would set QUIRE_PORT, which is the variable of --port.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "quire.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "quire.worker" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# Seconds that Ray's processes on a node, and with them the fleet's, outlive a head that is gone.
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
# Replicas and gateways are processes of Ray's workers, which else yield to all others.
- name: RAY_worker_niceness
  value: "0"
{{- end }}

{{- define "quire.secret" -}}
- name: QUIRE_FLEET_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secretName }}
      key: secret
{{- end }}

{{- define "quire.hub" -}}
{{- with .Values.hfTokenSecretName }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- end }}

{{- /* These two are for the values of one component. */ -}}

{{- define "quire.placing" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "quire.amounts" -}}
cpu: {{ .cpu }}
memory: {{ .memory }}
{{- with .gpu }}
{{ . }}: 1
{{- end }}
{{- end }}
