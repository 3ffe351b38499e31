{{- /* What a schema cannot say, or cannot say well. Every message tells what to do. */ -}}
{{- define "tiercheck.checks" -}}
{{- if gt (int .Values.replicas) 1 }}
{{- fail (printf "\n\nreplicas: %v is not possible, because the operator elects no leader: two of them would undo each other's work.\nLeave replicas at 1. While the operator is away, training and checkpoints go on; a lost one is replaced within a minute.\n" .Values.replicas) }}
{{- end }}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) }}
{{- fail "\n\nserviceAccount.create is false and serviceAccount.name is empty.\nName the service account that the operator shall use, or let the chart create one.\n" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.service.enabled) }}
{{- fail "\n\nmetrics.serviceMonitor.enabled needs the Service that it scrapes.\nSet metrics.service.enabled to true.\n" }}
{{- end }}
{{- $own := dict "TIERCHECK_SIDECAR_IMAGE" "sidecar.image" "TIERCHECK_NAMESPACES" "watchNamespaces" "TIERCHECK_METRICS_ADDRESS" "metrics.port" "POD_IP" "nothing: it is the pod's address" }}
{{- range $name, $_ := .Values.settings }}
{{- $_ := set $own (printf "TIERCHECK_%s" (snakecase $name | upper)) (printf "settings.%s" $name) }}
{{- end }}
{{- range .Values.extraEnv }}
{{- if hasKey $own .name }}
{{- fail (printf "\n\nextraEnv sets %s, which the chart sets itself.\nRemove it from extraEnv, and set %s.\n" .name (get $own .name)) }}
{{- end }}
{{- end }}
{{- if .Values.metrics.prometheusRule.enabled }}
{{- $alerts := list }}
{{- range (include "tiercheck.alerts" . | fromYaml).groups }}
{{- range .rules }}{{ $alerts = append $alerts .alert }}{{ end }}
{{- end }}
{{- range .Values.metrics.prometheusRule.disabled }}
{{- if not (has . $alerts) }}
{{- fail (printf "\n\nmetrics.prometheusRule.disabled names %q, which is no alert of this chart.\nThere are: %s.\n" . (join ", " $alerts)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
