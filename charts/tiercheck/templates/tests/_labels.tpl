{{- define "tiercheck.testLabels" -}}
app.kubernetes.io/name: {{ include "tiercheck.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}
