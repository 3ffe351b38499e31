{{- define "tiercheck.name" -}}
{{- default .Chart.Name .Values.nameOverride }}
{{- end }}

{{- /* Release and chart name, short enough for every suffix that is put behind it. */ -}}
{{- define "tiercheck.fullname" -}}
{{- $name := include "tiercheck.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "tiercheck.operator" -}}
{{ include "tiercheck.fullname" . }}-operator
{{- end }}

{{- define "tiercheck.attach" -}}
{{ include "tiercheck.fullname" . }}-attach
{{- end }}

{{- /* Suffix of names that are not in a namespace, so that several releases, each for its own namespaces, can stand side by side. */ -}}
{{- define "tiercheck.clusterSuffix" -}}
{{- if .Values.watchNamespaces }}-{{ .Release.Namespace }}{{ end }}
{{- end }}

{{- define "tiercheck.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "tiercheck.operator" .) }}
{{- end }}

{{- define "tiercheck.selector" -}}
app.kubernetes.io/name: {{ include "tiercheck.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "tiercheck.labels" -}}
app.kubernetes.io/name: {{ include "tiercheck.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tiercheck.annotations" -}}
{{- with .Values.commonAnnotations }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- /* Names of pull Secrets, of a list whose entries are names or {name: ...}, beside the global ones; with spaces between. */ -}}
{{- define "tiercheck.pullSecretNames" -}}
{{- $names := list }}
{{- range concat ((.root.Values.global).imagePullSecrets | default list) (.secrets | default list) }}
{{- $names = append $names (kindIs "string" . | ternary . (get (kindIs "map" . | ternary . dict) "name")) }}
{{- end }}
{{- $names | uniq | join " " }}
{{- end }}

{{- define "tiercheck.pullSecrets" -}}
{{- range include "tiercheck.pullSecretNames" (dict "secrets" .Values.imagePullSecrets "root" .) | splitList " " | compact }}
- name: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "tiercheck.metricsScheme" -}}
{{ .Values.metrics.tls.secretName | empty | ternary "http" "https" }}
{{- end }}

{{- define "tiercheck.crds.annotations" -}}
{{- $annotations := merge (dict) .Values.crds.annotations .Values.commonAnnotations }}
{{- if .Values.crds.keep }}
{{- $annotations = set $annotations "helm.sh/resource-policy" "keep" }}
{{- end }}
{{- with $annotations }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- /* Of (dict "image" <image values> "root" $). */ -}}
{{- define "tiercheck.image" -}}
{{- with .image.registry | default (.root.Values.global).imageRegistry }}{{ . }}/{{ end }}
{{- .image.repository }}
{{- if or .image.tag (not .image.digest) }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- with .image.digest }}@{{ . }}{{ end }}
{{- end }}
