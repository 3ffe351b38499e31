{{- /* files/alerts.yaml with the thresholds filled in. */ -}}
{{- define "tiercheck.alerts" -}}
{{- $text := .Files.Get "files/alerts.yaml" }}
{{- range $name := list "peerStaleSeconds" "remoteStaleSeconds" "proofStaleSeconds" "stalledMinutes" }}
{{- $text = $text | replace (printf "${%s}" $name) (get $.Values.metrics.prometheusRule $name | int64 | toString) }}
{{- end }}
{{- $text }}
{{- end }}
