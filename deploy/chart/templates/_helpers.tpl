{{- define "sluice.labels" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "sluice.caLabels" -}}
app.kubernetes.io/name: sluice-ca
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "sluice.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Not empty if containers of captured pods are given the proxy's CA. Without quotes, off is false in YAML. */}}
{{- define "sluice.trust" -}}
{{- if not (has (toString .Values.config.trust.ca) (list "off" "false")) }}true{{ end -}}
{{- end }}

{{/* The configuration file of sluiced. An address or a service of the upstream replaces the default podSelector. */}}
{{- define "sluice.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if or $config.upstream.address $config.upstream.service -}}
{{- $_ := unset $config.upstream "podSelector" -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* The version of the API of the policy that writes sluice.dev/opt-in, or nothing if there is no policy. */}}
{{- define "sluice.optInPolicy" -}}
{{- $group := "admissionregistration.k8s.io" -}}
{{- if ne .Values.config.capture.source "kubernetes" -}}
{{- else if ne .Values.optInPolicy "auto" -}}
{{- if ne .Values.optInPolicy "none" -}}
{{- $group }}/{{ .Values.optInPolicy -}}
{{- end -}}
{{- else if .Capabilities.APIVersions.Has (printf "%s/v1/MutatingAdmissionPolicy" $group) -}}
{{- $group }}/v1
{{- else if .Capabilities.APIVersions.Has (printf "%s/v1beta1/MutatingAdmissionPolicy" $group) -}}
{{- $group }}/v1beta1
{{- end -}}
{{- end }}
