{{- define "omni-proxy.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "omni-proxy.selector" -}}
app.kubernetes.io/name: omni-proxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "omni-proxy.labels" -}}
{{ include "omni-proxy.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "omni-proxy.valkeySelector" -}}
app.kubernetes.io/name: valkey
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
