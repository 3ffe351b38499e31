{{- /* What a schema cannot say, or cannot say well. Every message says what to do. */ -}}
{{- define "tiercheck.checks" -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) }}
{{- fail "\n\nserviceAccount.create is false and serviceAccount.name is empty.\nName the service account that the operator shall use, or let the chart create one.\n" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.service.enabled) }}
{{- fail "\n\nmetrics.serviceMonitor.enabled needs the Service that it scrapes.\nSet metrics.service.enabled to true.\n" }}
{{- end }}
{{- if and .Values.attach.enabled (eq (int .Values.attach.port) (int .Values.metrics.port)) }}
{{- fail (printf "\n\nattach.port and metrics.port are both %v.\nSet attach.port to another port.\n" .Values.attach.port) }}
{{- end }}
{{- if and .Values.attach.certManager.enabled (not .Values.attach.certManager.issuerRef.name) }}
{{- fail "\n\nattach.certManager.enabled needs an issuer.\nSet attach.certManager.issuerRef to {name: ..., kind: Issuer or ClusterIssuer}.\n" }}
{{- end }}
{{- $own := dict "TIERCHECK_SIDECAR_IMAGE" "sidecar.image" "TIERCHECK_SIDECAR_PULL_POLICY" "sidecar.image.pullPolicy" "TIERCHECK_SIDECAR_PULL_SECRETS" "sidecar.imagePullSecrets" "TIERCHECK_NAMESPACES" "watchNamespaces" "TIERCHECK_METRICS_ADDRESS" "metrics.port" "TIERCHECK_LEASE" "nothing: the lease has the name of the Deployment" "TIERCHECK_IDENTITY" "nothing: it is the pod's name" "POD_IP" "nothing: it is the pod's address" "TIERCHECK_WEBHOOK_ADDRESS" "attach.port" "TIERCHECK_WEBHOOK_SECRET" "attach.enabled" "TIERCHECK_WEBHOOK_CONFIGURATION" "attach.enabled" "TIERCHECK_WEBHOOK_HOSTS" "attach.enabled" "TIERCHECK_WEBHOOK_ISSUER" "attach.certManager" "TIERCHECK_METRICS_TLS" "metrics.tls.secretName" }}
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
