{{- /* What several objects have in common. */ -}}

{{- define "quire.labels" -}}
app.kubernetes.io/part-of: quire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
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
- name: FLEET_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secretName }}
      key: secret
{{- end }}
