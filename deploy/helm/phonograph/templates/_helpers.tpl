{{- define "phonograph.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "phonograph.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "phonograph.labels" -}}
{{ include "phonograph.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "phonograph.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.device) }}
{{- end }}

{{- define "phonograph.secret" -}}
{{ .Values.secret.existing | default (include "phonograph.name" .) }}
{{- end }}

{{- define "phonograph.claim" -}}
{{ .Values.persistence.existingClaim | default (include "phonograph.name" .) }}
{{- end }}
