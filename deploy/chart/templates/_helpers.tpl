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

{{/* No registry has an image under localhost/. Never says so in the pod's status, and tries none. */}}
{{- define "sluice.pullPolicy" -}}
{{- $loaded := hasPrefix "localhost/" .Values.image.repository -}}
{{ .Values.image.pullPolicy | default (ternary "Never" "IfNotPresent" $loaded) }}
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

{{/* The name of the ConfigMap with this configuration. */}}
{{- define "sluice.configName" -}}
sluice-{{ include "sluice.config" . | sha256sum | trunc 10 }}
{{- end }}

{{/* The version of the API of the policy that writes sluice.dev/opt-in, or nothing if there is no policy. */}}
{{- define "sluice.optInPolicy" -}}
{{- include "sluice.mutatingPolicy" (list . .Values.optInPolicy) -}}
{{- end }}

{{/* Likewise of the policy for runtimes without NRI. */}}
{{- define "sluice.trustPolicy" -}}
{{- if include "sluice.trust" . -}}
{{- include "sluice.mutatingPolicy" (list . .Values.trustPolicy) -}}
{{- end -}}
{{- end }}

{{/* The version of the API of a MutatingAdmissionPolicy, from the value that asks for it. */}}
{{- define "sluice.mutatingPolicy" -}}
{{- $root := index . 0 -}}
{{- $asked := index . 1 -}}
{{- $group := "admissionregistration.k8s.io" -}}
{{- if ne $root.Values.config.capture.source "kubernetes" -}}
{{- else if ne $asked "auto" -}}
{{- if ne $asked "none" -}}
{{- $group }}/{{ $asked -}}
{{- end -}}
{{- else if $root.Capabilities.APIVersions.Has (printf "%s/v1/MutatingAdmissionPolicy" $group) -}}
{{- $group }}/v1
{{- else if $root.Capabilities.APIVersions.Has (printf "%s/v1beta1/MutatingAdmissionPolicy" $group) -}}
{{- $group }}/v1beta1
{{- end -}}
{{- end }}

{{/* In CEL, whether one of a list of label selectors selects the namespace of the pod. */}}
{{- define "sluice.selectsNamespace" -}}
{{- $selectors := list -}}
{{- range . -}}
{{- $terms := list "true" -}}
{{- range $key, $value := .matchLabels -}}
{{- $terms = append $terms (printf "variables.namespaceLabels[?%q] == optional.of(%q)" $key $value) -}}
{{- end -}}
{{- range .matchExpressions -}}
{{- $has := printf "%q in variables.namespaceLabels" .key -}}
{{- $in := printf "%s && variables.namespaceLabels[%q] in %s" $has .key (toJson (.values | default list)) -}}
{{- if eq .operator "Exists" -}}{{- $terms = append $terms $has -}}{{- end -}}
{{- if eq .operator "DoesNotExist" -}}{{- $terms = append $terms (printf "!(%s)" $has) -}}{{- end -}}
{{- if eq .operator "In" -}}{{- $terms = append $terms $in -}}{{- end -}}
{{- if eq .operator "NotIn" -}}{{- $terms = append $terms (printf "!(%s)" $in) -}}{{- end -}}
{{- end -}}
{{- $selectors = append $selectors (join " && " $terms) -}}
{{- end -}}
{{ join " || " $selectors | default "false" }}
{{- end }}

{{/* The variables in CEL by which a policy knows whether a pod is opted in. package optin has the same rules. */}}
{{- define "sluice.optedIn" -}}
- name: namespaceLabels
  expression: namespaceObject.metadata.?labels.orValue({})
- name: ofPod
  expression: object.metadata.?labels[?"sluice.dev/capture"]
- name: ofNamespace
  expression: variables.namespaceLabels[?"sluice.dev/capture"]
{{- $namespaces := .Values.config.capture.namespaces | default dict }}
- name: enforced
  expression: >-
    variables.ofNamespace.orValue("") == "enforced" ||
    {{ include "sluice.selectsNamespace" $namespaces.enforced }}
- name: selected
  expression: >-
    {{ include "sluice.selectsNamespace" $namespaces.selected }}
# A value that is neither true nor false counts as true here: the daemon judges it.
- name: optedIn
  expression: >-
    variables.enforced ||
    variables.ofPod.or(variables.ofNamespace).orValue(variables.selected ? "true" : "false") != "false"
{{- end }}

{{/* In CEL, the additions to the container c of a list: containers or initContainers. */}}
{{- define "sluice.trustingContainer" -}}
Object.spec.{{ . }}{
  name: c.name,
  env: variables.environment.filter(v, !c.?env.orValue([]).exists(e, e.name in v)).map(v,
    Object.spec.{{ . }}.env{name: v[0], value: "/.sluice-ca/bundle.crt"}),
  volumeMounts: c.?volumeMounts.orValue([]).exists(m, m.mountPath == "/.sluice-ca") ? [] :
    [Object.spec.{{ . }}.volumeMounts{name: "sluice-ca", mountPath: "/.sluice-ca", readOnly: true}]
}
{{- end }}
