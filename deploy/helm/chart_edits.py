"""Where the chart's values stand in the files of deploy/k8s, for make_chart. Texts are Helm's own template language, in
which `@EXPRESSION` at the end of a line is that value as YAML below the line."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    kind: str  # put (instead of a line and all below it) | before it | after all below it
    line: str  # without its comment, and without its indentation unless it begins with that
    new: str

    def text(self, indent: int) -> str:
        return re.sub(r" @(.+)$", rf" {{{{- toYaml \1 | nindent {indent + 2} }}}}", self.new, flags=re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """Documents of files of deploy/k8s, or one block of them."""

    sources: tuple[str, ...]
    edits: tuple[Edit, ...] = ()
    begin: tuple[str, ...] = ()  # one `end` closes each that opens something
    documents: tuple[int | None, int | None] = (None, None)  # from the first to before the second
    block: str = ""
    texts: tuple[tuple[str, str], ...] = ()


def put(line: str, *new: str) -> Edit:
    return Edit("put", line, "\n".join(new))


def before(line: str, *new: str) -> Edit:
    return Edit("before", line, "\n".join(new))


def after(line: str, *new: str) -> Edit:
    return Edit("after", line, "\n".join(new))


def when(condition: str, *new: str) -> str:
    return "\n".join((f"{{{{- if {condition} }}}}", *new, "{{- end }}"))


def given(value: str, new: str) -> str:
    return "\n".join((f"{{{{- with {value} }}}}", new, "{{- end }}"))


def workload(values: str, component: str, settings: str) -> tuple[Edit, ...]:
    """What may be said of the pods of each service, which roll when settings change that they read."""
    checksum = f'{{{{ include "kvfleet.checksum" (list $ {settings}) }}}}'
    spread = f'(list {values}.topologySpreadConstraints "{component}" {"$name" if component == "worker" else POOLESS})'
    return (
        before("    spec:", f"  annotations: {{ checksum/settings: {checksum} }}"),
        put("maxUnavailable: 1", f"maxUnavailable: {{{{ {values}.podDisruptionBudget.maxUnavailable }}}}"),
        put("topologySpreadConstraints:", f'{{{{- include "kvfleet.topologySpread" {spread} | nindent 6 }}}}'),
        before("      containers:", f'{{{{- include "kvfleet.podSettings" (list $ {values}) | nindent 6 }}}}'),
    )


POOLESS = '""'
POOLS = 'range $name, $pool := include "kvfleet.pools" $ | fromYaml'
VLLM = 'eq $pool.engine "vllm"'
SHARED_MEMORY = f"or ({VLLM}) (gt (int $pool.tensorParallelSize) 1)"
OWN_NATS = 'eq .Values.nats.servers "own"'
OUR_POLICIES = 'ne .Values.nats.servers "existing"'  # of the pods of NATS, whether this chart or NATS's own makes them
TO_NATS = (
    r"    - to:\n        - podSelector:\n            matchLabels: \{ app.kubernetes.io/name: kvfleet, "
    r"app.kubernetes.io/component: nats \}\n      ports: \[\{ protocol: TCP, port: 4222 \}\]"
)
SECRETS = {
    "nkeys": "nkeys",
    "node-tls": "nodeTls",
    "fleet-key": "fleetKey",
    "api-keys": "apiKeys",
    "ingress-tls": "ingressTls",
    "nats-tls": "natsTls",
    "nats-nkeys": "natsNkeys",
    "hub-token": "hubToken",
}

# In every template: images, Secrets' names, the way to NATS.
TEXTS = (
    (r"\.\./\.\./README\.md", "deploy/k8s/README.md"),
    (
        r"image: kvfleet-(control|nats|vllm)\n",
        r'image: {{ include "kvfleet.image" (list $ $.Values.image.\1) }}' + "\n",
    ),
    (r"imagePullPolicy: IfNotPresent", "imagePullPolicy: {{ $.Values.image.pullPolicy }}"),
    (
        TO_NATS,
        "    - to: {{- toYaml $.Values.nats.peers | nindent 8 }}\n"
        "      ports: [{ protocol: TCP, port: {{ $.Values.nats.port }} }]",
    ),
    *(
        (rf"(?<=ame: )kvfleet-{name}(?=[ ,\n])", f"{{{{ $.Values.secrets.{value} }}}}")
        for name, value in SECRETS.items()
    ),
)

# ConfigMaps by what stands after `kvfleet-` in their names: whose kustomization has what they hold, under what name.
SETTINGS = {
    "nats-client": ("base", "kvfleet-nats-client"),
    "service": ("base", "kvfleet-service"),
    "data-plane": ("base", "kvfleet-data-plane"),
    "ingress": ("base/ingress", "kvfleet-ingress"),
    "placement": ("base/placement", "kvfleet-placement"),
    "worker": ("base/worker", "kvfleet-worker"),
    "vault": ("components/vault", "kvfleet-vault"),
    "vllm": ("components/vllm", "kvfleet-worker"),
    "autoscaling": ("components/keda", "kvfleet-autoscaling"),
}

INGRESS = (
    *workload("$.Values.ingress", "ingress", '"nats-client" "service" "ingress"'),
    put("resources:", "resources: @$.Values.ingress.resources"),
    before("  type: LoadBalancer", given("$.Values.ingress.service.loadBalancerIP", "loadBalancerIP: {{ . }}")),
    put("type: LoadBalancer", "type: {{ $.Values.ingress.service.type }}"),
    put(
        "externalTrafficPolicy: Local",
        when(
            'ne $.Values.ingress.service.type "ClusterIP"',
            "externalTrafficPolicy: Local # clients' addresses stay for the audit log",
        ),
    ),
    put("minReplicas: 2", "minReplicas: {{ $.Values.ingress.minReplicas }}"),
    put("maxReplicas: 10", "maxReplicas: {{ $.Values.ingress.maxReplicas }}"),
    put(
        "target: { type: Utilization, averageUtilization: 70 }",
        "target: { type: Utilization, averageUtilization: {{ $.Values.ingress.targetCPUUtilization }} }",
    ),
)
ANNOTATED = (r"(?<=\nkind: Service\nmetadata:\n)", "{{- with $.Values.ingress.service.annotations }}\n"
             "  annotations: {{- toYaml . | nindent 4 }}\n{{- end }}\n")  # fmt: skip

PLACEMENT = (
    *workload("$.Values.placement", "placement", '"nats-client" "service" "placement" "autoscaling"'),
    put("replicas: 2", "replicas: {{ $.Values.placement.replicas }}"),
    put("resources:", "resources: @$.Values.placement.resources"),
    after(
        "- configMapRef: { name: kvfleet-placement }",
        when("$.Values.autoscaling.enabled", "- configMapRef: { name: kvfleet-autoscaling }"),
    ),
)

WORKER = (
    *workload("$pool", "worker", '"nats-client" "service" "data-plane" $name'),
    put("  name: worker", "name: {{ $name }}"),
    put("replicas: 4", when("not $.Values.autoscaling.enabled", "replicas: {{ $pool.replicas }}")),
    put("serviceName: worker", "serviceName: {{ $name }}"),
    put(
        "terminationGracePeriodSeconds: 120",
        "terminationGracePeriodSeconds: {{ $pool.terminationGracePeriodSeconds }} # above the hook and KVFLEET_DRAIN_S",
    ),
    before(
        "      containers:",
        when(VLLM, '{{- include "kvfleet.vllm" (merge (dict "name" $name "pool" $pool) $) | nindent 6 }}'),
    ),
    put(
        "image: kvfleet-worker",
        'image: {{ include "kvfleet.image" (list $ ($pool.image | default $.Values.image.worker)) }}',
    ),
    put("- configMapRef: { name: kvfleet-worker }", "- configMapRef: { name: kvfleet-{{ $name }} }"),
    put("failureThreshold: 360", f"failureThreshold: {{{{ ternary 60 360 ({VLLM}) }}}} # a vLLM is loaded before"),
    put(
        "resources:",
        'resources: {{- include "kvfleet.resources" (list $pool $pool.resources "kvfleet") | nindent 12 }}',
    ),
    before("envFrom:", when("$.Values.hub.enabled", "  - { name: HF_TOKEN_PATH, value: /etc/kvfleet/hub/token }")),
    after(
        "volumeMounts:",
        when(VLLM, "  - { name: sockets, mountPath: /run/kvfleet }"),
        when(SHARED_MEMORY, "  - { name: shm, mountPath: /dev/shm }"),
        when("$.Values.hub.enabled", "  - { name: hub, mountPath: /etc/kvfleet/hub, readOnly: true }"),
        given("$pool.volumeMounts", "{{- toYaml . | nindent 12 }}"),
    ),
    put("emptyDir: { sizeLimit: 20Gi }", "emptyDir: { sizeLimit: {{ $pool.stateSize }} }"),
    after(
        "volumes:",
        when(
            VLLM,
            "  - name: sockets",
            "    emptyDir: { sizeLimit: 16Mi }",
            "  - name: vllm-tmp",
            "    emptyDir: { sizeLimit: 4Gi }",
        ),
        when(
            SHARED_MEMORY,
            "  - name: shm # KVFLEET_HOST_BYTES, and what NCCL and vLLM's processes exchange",
            "    emptyDir: { medium: Memory, sizeLimit: {{ $pool.shmSize }} }",
        ),
        when(
            f"or $.Values.hub.enabled ({VLLM})",
            "  - name: hub # for models that want one's consent; the Secret may be absent",
            "    secret: { secretName: kvfleet-hub-token, optional: true, defaultMode: 0440 }",
        ),
        given("$pool.volumes", "{{- toYaml . | nindent 8 }}"),
    ),
)
IN_POOL = (r"app.kubernetes.io/component: worker", "app.kubernetes.io/component: worker, kvfleet.dev/pool: {{ $name }}")

VLLM_CONTAINER = (
    before(
        "    env:",
        when("gt (int $pool.tensorParallelSize) 1", "  - --tensor-parallel-size={{ $pool.tensorParallelSize }}"),
        "{{- range $pool.vllm.args }}",
        "  - {{ . | quote }}",
        "{{- end }}",
    ),
    put(
        "resources:",
        'resources: {{- include "kvfleet.resources" (list $pool $pool.vllm.resources "vllm") | nindent 6 }}',
    ),
    after("volumeMounts:", given("$pool.volumeMounts", "{{- toYaml . | nindent 6 }}")),
)  # fmt: skip

VAULT = (
    *workload("$.Values.vault", "vault", '"nats-client" "service" "data-plane" "vault"'),
    put("replicas: 2", "replicas: {{ $.Values.vault.replicas }}"),
    put("          resources:", "resources: @$.Values.vault.resources"),
    before("accessModes: [ReadWriteOnce]", given("$.Values.vault.storageClassName", "storageClassName: {{ . }}")),
    put(
        "resources: { requests: { storage: 100Gi } }",
        "resources: { requests: { storage: {{ $.Values.vault.storage }} } }",
    ),
)

NATS = (
    *workload("$.Values.nats", "nats", '"nats"'),
    put("          resources:", "resources: @$.Values.nats.resources"),
    put("value: 900MiB", "value: {{ $.Values.nats.goMemoryLimit }}"),
    before("accessModes: [ReadWriteOnce]", given("$.Values.nats.storageClassName", "storageClassName: {{ . }}")),
    put(
        "resources: { requests: { storage: 10Gi } }",
        "resources: { requests: { storage: {{ $.Values.nats.storage }} } } # above max_file_store",
    ),
)

INIT = (
    put('args: [init, --replicas, "3"]', "args: [init, --replicas, {{ $.Values.nats.replicas | quote }}]"),
    before("containers:", '{{- include "kvfleet.podSettings" (list $ $.Values.placement) | nindent 6 }}'),
)
JOB = (
    (r"(never changed in place): where\n# a new version.*", r"\1:\n# its name changes with what it is made from."),
    (
        r"(?<=kind: Job\nmetadata:\n  name: )init$",
        "init-{{ list $.Chart.AppVersion $.Values.image $.Values.secrets $.Values.nats.urls $.Values.nats.replicas"
        ' (include "kvfleet.podSettings" (list $ $.Values.placement)) | toJson | sha256sum | trunc 8 }}',
    ),
)

SCALED = (
    put("  name: worker", "name: {{ $name }}"),
    put(
        "scaleTargetRef: { apiVersion: apps/v1, kind: StatefulSet, name: worker }",
        "scaleTargetRef: { apiVersion: apps/v1, kind: StatefulSet, name: {{ $name }} }",
    ),
    put("minReplicaCount: 4", "minReplicaCount: {{ $.Values.autoscaling.minReplicas }}"),
    put("maxReplicaCount: 16", "maxReplicaCount: {{ $.Values.autoscaling.maxReplicas }}"),
    put("replicas: 4", "replicas: {{ $.Values.autoscaling.minReplicas }}"),
    before(
        "      metricType: AverageValue",
        when(
            "$.Values.autoscaling.podIdentity",
            "authenticationRef: { kind: TriggerAuthentication, name: managed-prometheus }",
        ),
    ),
    put(
        "serverAddress: http://prometheus-operated.monitoring.svc:9090",
        "serverAddress: {{ $.Values.autoscaling.serverAddress }}",
    ),
    put(
        'query: max(kvfleet_model_desired_replicas{model="demo"})',
        "query: max(kvfleet_model_desired_replicas{model={{ $pool.servedModelName | default $pool.model | quote }}})",
    ),
)

GOOGLES_ACCOUNT = put(
    "podIdentity: { provider: gcp }", "podIdentity: { provider: {{ $.Values.autoscaling.podIdentity }} }"
)

POLICIES = "base/network-policies/"
FROM_MONITORING = put(
    "matchLabels: { kubernetes.io/metadata.name: monitoring }",
    "matchLabels: { kubernetes.io/metadata.name: {{ $.Values.monitoring.namespace }} }",
)
TO_COLLECTOR = put(
    "matchLabels: { kubernetes.io/metadata.name: observability }",
    "matchLabels: { kubernetes.io/metadata.name: {{ $.Values.tracing.namespace }} }",
)
DNS = after("        - namespaceSelector:", given("$.Values.networkPolicies.dnsPeers", "{{- toYaml . | nindent 8 }}"))
RELEASE = before("spec:", given("$.Values.monitoring.labels", "    {{- toYaml . | nindent 4 }}"))
OPERATOR = 'eq .Values.monitoring.operator "prometheus"'
GOOGLE = 'eq .Values.monitoring.operator "google"'

TEMPLATES = {
    "priority-classes.yaml": (Part(("base/priority-classes.yaml",), begin=("if .Values.priorityClasses.create",)),),
    "ingress.yaml": (Part(("base/ingress/ingress.yaml", "base/ingress/service.yaml"), INGRESS, texts=(ANNOTATED,)),),
    "placement.yaml": (Part(("base/placement/placement.yaml",), PLACEMENT),),
    "_vllm.tpl": (
        Part(
            ("components/vllm/vllm.yaml",),
            VLLM_CONTAINER,
            ('define "kvfleet.vllm"', "$name := .name", "$pool := .pool"),
            block="      initContainers:",
            texts=(
                (r"name: kvfleet-worker,", "name: kvfleet-{{ $name }},"),
                (r"(docs/vllm.md says what each is for\.).*\n.*op: add.*", r"\1"),
            ),
        ),
    ),
    "worker.yaml": (
        Part(("base/worker/worker.yaml",), documents=(0, 1)),
        Part(("base/worker/worker.yaml",), WORKER, (POOLS,), (1, None), texts=(IN_POOL,)),
    ),
    "vault.yaml": (Part(("components/vault/vault.yaml",), VAULT, ("if .Values.vault.enabled",)),),
    "nats.yaml": (Part(("base/nats/nats.yaml",), NATS, (f"if {OWN_NATS}",)),),
    "init.yaml": (Part(("base/nats/init.yaml",), INIT, texts=JOB),),
    "network-policies.yaml": (
        Part(
            tuple(f"{POLICIES}{one}.yaml" for one in ("default-deny", "dns", "ingress", "placement", "worker", "init")),
            (DNS,),
            ("if .Values.networkPolicies.enabled",),
        ),
        Part((f"{POLICIES}nats.yaml",), begin=(f"if and .Values.networkPolicies.enabled ({OUR_POLICIES})",)),
        *(
            Part((source,), edits, (f"if and .Values.networkPolicies.enabled ({condition})",))
            for source, edits, condition in (
                ("components/vault/network-policy.yaml", (), ".Values.vault.enabled"),
                ("components/hub/network-policy.yaml", (), ".Values.hub.enabled"),
                ("components/producers/network-policy.yaml", (DNS,), ".Values.producers.enabled"),
                ("components/monitoring/network-policy.yaml", (FROM_MONITORING,), OPERATOR),
                ("components/monitoring-gke/network-policy.yaml", (), GOOGLE),
                (
                    "components/tracing/network-policy.yaml",
                    (TO_COLLECTOR,),
                    ".Values.tracing.endpoint",
                ),
            )
        ),
    ),
    "autoscaling.yaml": (
        Part(("components/keda/scaled-object.yaml",), SCALED, ("if .Values.autoscaling.enabled", POOLS)),
        Part(
            ("overlays/gke-gpu/trigger-authentication.yaml",),
            (GOOGLES_ACCOUNT,),
            ("if and .Values.autoscaling.enabled .Values.autoscaling.podIdentity",),
        ),
    ),
    "monitoring.yaml": (
        Part(
            ("components/monitoring/service-monitor.yaml", "components/monitoring/prometheus-rule.yaml"),
            (RELEASE,),
            (f"if {OPERATOR}",),
        ),
        Part(
            ("components/monitoring-gke/pod-monitoring.yaml", "components/monitoring-gke/rules.yaml"),
            begin=(f"if {GOOGLE}",),
        ),
    ),
}  # fmt: skip
