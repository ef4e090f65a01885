{{- define "imds-relay.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- define "imds-relay.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.role }}
{{- end }}

{{- define "imds-relay.labels" -}}
{{ include "imds-relay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "imds-relay.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "imds-relay.has-tls" -}}
{{- if (.Values.config.api | default dict).tls }}true{{ end -}}
{{- end }}

{{- define "imds-relay.probe" -}}
httpGet:
  {{- if ne .root.Values.role "hub" }}
  host: {{ if eq .root.Values.api.host "0.0.0.0" }}127.0.0.1{{ else }}{{ .root.Values.api.host }}{{ end }}
  {{- end }}
  path: {{ .path }}
  port: {{ .root.Values.api.port }}
  scheme: {{ if include "imds-relay.has-tls" .root }}HTTPS{{ else }}HTTP{{ end }}
timeoutSeconds: 5
{{- end }}

{{- define "imds-relay.pod" -}}
{{- $hub := eq .Values.role "hub" -}}
metadata:
  labels:
    {{- include "imds-relay.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    imds-relay/configuration: {{ toYaml .Values.config | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "imds-relay.name" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if not $hub }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  # The relay ends within ten seconds.
  terminationGracePeriodSeconds: 15
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: relay
      image: {{ include "imds-relay.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [run, --config, /etc/imds-relay/relay.yaml]
      env:
        - name: IMDS_RELAY_STORE__PATH
          value: /var/lib/imds-relay/state/relay.db # a folder of its own: a volume can belong to another user
        - name: IMDS_RELAY_API__LISTEN
          value: {{ printf "%s:%v" (ternary "0.0.0.0" .Values.api.host $hub) .Values.api.port | quote }}
        - name: IMDS_RELAY_API__SOCKET
          value: /run/imds-relay/relay.sock
        {{- if and (not (include "imds-relay.has-tls" .)) (or $hub (ne .Values.api.host "127.0.0.1")) }}
        - name: IMDS_RELAY_API__ALLOW_HTTP
          value: "true"
        {{- end }}
        {{- range .Values.secretEnv }}
        - name: {{ .name }}
          valueFrom:
            secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}
        {{- end }}
      ports:
        - name: api
          containerPort: {{ .Values.api.port }}
      startupProbe:
        {{- include "imds-relay.probe" (dict "root" . "path" "/healthz") | nindent 8 }}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        {{- include "imds-relay.probe" (dict "root" . "path" "/healthz") | nindent 8 }}
        periodSeconds: 10
        failureThreshold: 6
      readinessProbe:
        {{- include "imds-relay.probe" (dict "root" . "path" "/readyz") | nindent 8 }}
        periodSeconds: 5
        failureThreshold: 2
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: configuration, mountPath: /etc/imds-relay, readOnly: true}
        - {name: state, mountPath: /var/lib/imds-relay}
        - {name: socket, mountPath: /run/imds-relay}
        - {name: temporary, mountPath: /tmp}
        {{- if .Values.secretFiles }}
        - {name: secrets, mountPath: /run/secrets/imds-relay, readOnly: true}
        {{- end }}
    {{- with .Values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: configuration
      configMap: {name: {{ include "imds-relay.name" . }}}
    - name: socket
      emptyDir: {medium: Memory, sizeLimit: 1Mi}
    - name: temporary
      emptyDir: {sizeLimit: 64Mi}
    {{- if not $hub }}
    - name: state
      {{- if .Values.state.hostPath }}
      hostPath: {path: {{ .Values.state.hostPath }}, type: Directory}
      {{- else }}
      emptyDir: {sizeLimit: 1Gi}
      {{- end }}
    {{- end }}
    {{- if .Values.secretFiles }}
    - name: secrets
      projected:
        defaultMode: 288  # 0440: user and group may read
        sources:
          {{- range .Values.secretFiles }}
          - secret:
              name: {{ .secret }}
              items: [{key: {{ .key }}, path: {{ .file }}}]
          {{- end }}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
