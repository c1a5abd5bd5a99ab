{{- /* Written by deploy/helm/make_chart from deploy/k8s: change what is there, or deploy/helm/chart_edits.py. */}}
{{- define "kvfleet.vllm" }}
{{- $name := .name }}
{{- $pool := .pool }}
initContainers:
  - name: vllm
    image: {{ include "kvfleet.image" (list $ $.Values.image.vllm) }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    restartPolicy: Always
    # docs/vllm.md says what each is for.
    args:
      - $(KVFLEET_MODEL)
      - --served-model-name=$(KVFLEET_SERVED_MODEL_NAME)
      - --host=127.0.0.1 # its routes know no tenants: the worker alone may ask
      - --port=8000
      - --enable-scale-out
      - --scheduling-policy=priority
      - --max-logprobs=129
      - --no-async-scheduling
      - --logits-processors=kvfleet_vllm.slot_sampler:SlotSampler # of the model runner that vLLM has on GPUs
      - >-
        --kv-transfer-config={"kv_connector":"KvfleetConnector",
        "kv_connector_module_path":"kvfleet_vllm.connector","kv_role":"kv_both",
        "kv_load_failure_policy":"recompute"}
      - >-
        --kv-events-config={"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557",
        "replay_endpoint":"tcp://127.0.0.1:5558","topic":"kv"}
{{- if gt (int $pool.tensorParallelSize) 1 }}
      - --tensor-parallel-size={{ $pool.tensorParallelSize }}
{{- end }}
{{- range $pool.vllm.args }}
      - {{ . | quote }}
{{- end }}
    env:
      - name: KVFLEET_MODEL
        valueFrom: { configMapKeyRef: { name: kvfleet-{{ $name }}, key: KVFLEET_MODEL } }
      - name: KVFLEET_SERVED_MODEL_NAME
        valueFrom: { configMapKeyRef: { name: kvfleet-{{ $name }}, key: KVFLEET_SERVED_MODEL_NAME } }
      - { name: HF_TOKEN_PATH, value: /etc/kvfleet/hub/token }
      - { name: VLLM_NO_USAGE_STATS, value: "1" }
    # The kubelet is not on the pod's loopback, so its probes run inside.
    startupProbe: # half an hour to fetch, load and compile; the worker is not started before
      exec: { command: [python3, -m, kvservice.health, --port, "8000", --path, /health] }
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 180
    readinessProbe: # while it is away the pod is not ready, though its worker runs
      exec: { command: [python3, -m, kvservice.health, --port, "8000", --path, /health] }
      periodSeconds: 10
      timeoutSeconds: 5
    livenessProbe: # a minute: a front end that parses long prompts may be late
      exec: { command: [python3, -m, kvservice.health, --port, "8000", --path, /health] }
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    resources: {{- include "kvfleet.resources" (list $pool $pool.vllm.resources "vllm") | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: { drop: [ALL] }
    volumeMounts:
      - { name: state, mountPath: /var/lib/kvfleet }
      - { name: sockets, mountPath: /run/kvfleet }
      - { name: shm, mountPath: /dev/shm }
      - { name: vllm-tmp, mountPath: /tmp }
      - { name: hub, mountPath: /etc/kvfleet/hub, readOnly: true }
{{- with $pool.volumeMounts }}
{{- toYaml . | nindent 6 }}
{{- end }}
{{- end }}
