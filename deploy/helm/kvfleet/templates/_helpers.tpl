{{- define "kvfleet.labels" -}}
app.kubernetes.io/part-of: kvfleet
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* (list $ NAME) */}}
{{- define "kvfleet.image" -}}
{{- $root := first . -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end }}{{ last . }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{- /* Pools by name, each with all values: its own over those of `worker`. What no schema can refuse is refused here. */}}
{{- define "kvfleet.pools" -}}
{{- $pools := dict }}
{{- $models := dict }}
{{- range $name, $own := .Values.pools }}
{{- $pool := mustMergeOverwrite (deepCopy $.Values.worker) ($own | default dict) }}
{{- $model := $pool.servedModelName | default $pool.model }}
{{- $cards := int $pool.tensorParallelSize }}
{{- if and $.Values.autoscaling.enabled (hasKey $models $model) }}
{{- fail (printf "pools.%s and pools.%s serve %s: with autoscaling.enabled each would grow to what the model needs" (get $models $model) $name $model) }}
{{- end }}
{{- if and (gt $cards 1) (ne (int $pool.gpu.count) $cards) }}
{{- fail (printf "pools.%s: a model over %d cards wants gpu.count=%d" $name $cards $cards) }}
{{- end }}
{{- if and (gt $cards 1) (ne $pool.gpu.resource "nvidia.com/gpu") }}
{{- fail (printf "pools.%s: a model goes over several whole cards, not over several %s" $name $pool.gpu.resource) }}
{{- end }}
{{- if and (eq $pool.engine "vllm") (lt (int $pool.gpu.count) 1) }}
{{- fail (printf "pools.%s: vLLM wants gpu.count of 1 or more" $name) }}
{{- end }}
{{- $_ := set $models $model $name }}
{{- $_ := set $pools $name $pool }}
{{- end }}
{{- toYaml $pools }}
{{- end }}

{{- /* What each ConfigMap holds, by what stands after `kvfleet-` in its name. */}}
{{- define "kvfleet.configMaps" -}}
{{- $maps := .Files.Get "files/settings.yaml" | fromYaml }}
{{- $traced := dict }}
{{- with .Values.tracing.endpoint }}
{{- $traced = dict "KVFLEET_OTLP_ENDPOINT" . "KVFLEET_TRACE_SAMPLE_RATIO" $.Values.tracing.sampleRatio }}
{{- end }}
{{- $nats := dict "KVFLEET_NATS_URL" (join "," .Values.nats.urls) }}
{{- $_ := mustMergeOverwrite (get $maps "nats-client") $nats .Values.nats.settings }}
{{- $_ := mustMergeOverwrite $maps.service $traced .Values.settings }}
{{- $_ := mustMergeOverwrite $maps.ingress .Values.ingress.settings }}
{{- $_ := mustMergeOverwrite $maps.placement .Values.placement.settings }}
{{- $_ := mustMergeOverwrite $maps.vault .Values.vault.settings }}
{{- $models := list }}
{{- $ofEngine := dict "kvfleet" $maps.worker "vllm" (merge $maps.vllm $maps.worker) }}
{{- range $name, $pool := include "kvfleet.pools" . | fromYaml }}
{{- $served := $pool.servedModelName | default $pool.model }}
{{- $models = append $models $served }}
{{- $data := deepCopy (get $ofEngine $pool.engine) }}
{{- $_ := set $data "KVFLEET_MODEL" $pool.model }}
{{- if ne $served (get $data "KVFLEET_SERVED_MODEL_NAME" | default $pool.model) }}
{{- $_ := set $data "KVFLEET_SERVED_MODEL_NAME" $served }}
{{- end }}
{{- if ne $pool.role "both" }}
{{- $_ := set $data "KVFLEET_ROLE" $pool.role }}
{{- end }}
{{- if and (eq $pool.engine "kvfleet") (gt (int $pool.gpu.count) 0) }}
{{- $_ := set $data "KVFLEET_DEVICE" "cuda" }}
{{- if gt (int $pool.tensorParallelSize) 1 }}
{{- $_ := set $data "KVFLEET_TENSOR_PARALLEL_SIZE" ($pool.tensorParallelSize | toString) }}
{{- end }}
{{- end }}
{{- $_ := set $maps $name (mustMergeOverwrite $data $pool.settings) }}
{{- end }}
{{- $scaled := dict "KVFLEET_MODELS" (join "," $models) "KVFLEET_MIN_REPLICAS" (.Values.autoscaling.minReplicas | toString) "KVFLEET_MAX_REPLICAS" (.Values.autoscaling.maxReplicas | toString) }}
{{- $_ := mustMergeOverwrite $maps.autoscaling $scaled }}
{{- $unused := list "vllm" }}
{{- if not (hasKey .Values.pools "worker") }}{{ $unused = append $unused "worker" }}{{ end }}
{{- if not .Values.vault.enabled }}{{ $unused = append $unused "vault" }}{{ end }}
{{- if not .Values.autoscaling.enabled }}{{ $unused = append $unused "autoscaling" }}{{ end }}
{{- range $unused }}{{ $_ := unset $maps . }}{{ end }}
{{- toYaml $maps }}
{{- end }}

{{- /* (list $ NAME ...): of the ConfigMaps of these names, `nats` for the servers' own, for an annotation of the pods that
read them. */}}
{{- define "kvfleet.checksum" -}}
{{- $root := first . }}
{{- $maps := include "kvfleet.configMaps" $root | fromYaml }}
{{- $_ := set $maps "nats" (list (include "kvfleet.natsFiles" $root) ($root.Files.Get "files/kubernetes.conf")) }}
{{- $read := dict }}
{{- range rest . }}{{ $_ := set $read . (get $maps .) }}{{ end }}
{{- $read | toJson | sha256sum }}
{{- end }}

{{- /* The configuration of NATS's servers as a ConfigMap's data: a key holds no folder, so that a role's file is named after it. */}}
{{- define "kvfleet.natsFiles" -}}
{{- range list "production-cluster" "production" "accounts-nkeys" "roles" "region" "region-hub" "region-leaf" }}
{{ . }}.conf: {{ printf "files/nats/%s.conf" . | $.Files.Get | toJson }}
{{- end }}
{{- range list "ingress" "placement" "worker" "vault" "producer-public" "sys" "region-link" "region-guard" }}
roles-{{ . }}.conf: {{ printf "files/nats/roles/%s.conf" . | $.Files.Get | toJson }}
{{- end }}
{{- end }}

{{- /* (list $ VALUES) */}}
{{- define "kvfleet.podSettings" -}}
{{- with (first .).Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (last .).nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (last .).tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* (list CONSTRAINTS COMPONENT POOL): each over the pods of that component, and of that pool if it has a name. */}}
{{- define "kvfleet.topologySpread" -}}
{{- $labels := dict "app.kubernetes.io/name" "kvfleet" "app.kubernetes.io/component" (index . 1) }}
{{- with index . 2 }}{{ $_ := set $labels "kvfleet.dev/pool" . }}{{ end }}
{{- with first . }}
topologySpreadConstraints:
{{- range . }}
  - {{- merge (dict "labelSelector" (dict "matchLabels" $labels)) . | toYaml | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* (list POOL RESOURCES ENGINE): with the GPUs, if that container is the one that runs the model. */}}
{{- define "kvfleet.resources" -}}
{{- $pool := first . }}
{{- $resources := deepCopy (index . 1) }}
{{- if and (eq $pool.engine (last .)) (gt (int $pool.gpu.count) 0) }}
{{- $gpus := dict $pool.gpu.resource ($pool.gpu.count | toString) }}
{{- $resources = merge (dict "requests" $gpus "limits" $gpus | deepCopy) $resources }}
{{- end }}
{{- toYaml $resources }}
{{- end }}
