{{- define "sluice.labels" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "sluice.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What sluiced reads. The default podSelector gives way to another place of the upstream. */}}
{{- define "sluice.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if or $config.upstream.address $config.upstream.service -}}
{{- $_ := unset $config.upstream "podSelector" -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}
