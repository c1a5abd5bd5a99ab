"""Closed schemas of the custom resources that deploy/k8s uses, by hand from their owners' references: of each only what
is used there, so that a misspelt field is an error. What a field may hold beyond its type, an API server says.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(required: dict[str, Any], optional: dict[str, Any] | None = None) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "required": sorted(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
    }


def list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def resource(api_version: str, kind: str, spec: Schema) -> tuple[tuple[str, str], Schema]:
    metadata = closed({"name": TEXT, "namespace": TEXT}, {"labels": LABELS, "annotations": LABELS})
    whole = closed({"apiVersion": one_of(api_version), "kind": one_of(kind), "metadata": metadata, "spec": spec})
    return (api_version, kind), whole


SELECTOR = closed({"matchLabels": LABELS})
SCALING_RULES = closed(
    {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "policies": list_of(closed({"type": one_of("Pods", "Percent"), "value": COUNT, "periodSeconds": COUNT})),
    },
    {"selectPolicy": one_of("Max", "Min", "Disabled")},
)

# https://keda.sh/docs/latest/reference/scaledobject-spec, .../scalers/prometheus; metadata are strings, all of them
PROMETHEUS_TRIGGER = closed(
    {
        "type": one_of("prometheus"),
        "name": TEXT,
        "metricType": one_of("AverageValue", "Value"),
        "metadata": closed(
            {
                "serverAddress": {"type": "string", "pattern": "^https?://"},
                "query": TEXT,
                "threshold": {"type": "string", "pattern": r"^[0-9.]+$"},
                "ignoreNullValues": one_of("true", "false"),
            }
        ),
    },
    {"authenticationRef": closed({"name": TEXT}, {"kind": one_of("TriggerAuthentication")})},
)
SCALED_OBJECT = closed(
    {
        "scaleTargetRef": closed({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}),
        "minReplicaCount": COUNT,
        "maxReplicaCount": COUNT,
        "triggers": list_of(PROMETHEUS_TRIGGER),
        "fallback": closed(
            {"failureThreshold": COUNT, "replicas": COUNT},
            {"behavior": one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower")},
        ),
    },
    {
        "pollingInterval": COUNT,
        "advanced": closed(
            {
                "horizontalPodAutoscalerConfig": closed(
                    {"behavior": closed({"scaleUp": SCALING_RULES, "scaleDown": SCALING_RULES})}
                )
            }
        ),
    },
)

# https://prometheus-operator.dev/docs/api-reference/api
RELABELING = closed(
    {"action": one_of("replace"), "targetLabel": TEXT}, {"sourceLabels": list_of(TEXT), "replacement": TEXT}
)
SERVICE_MONITOR = closed(
    {
        "selector": SELECTOR,
        "endpoints": list_of(
            closed(
                {"port": TEXT, "path": TEXT},
                {"interval": DURATION, "scrapeTimeout": DURATION, "relabelings": list_of(RELABELING)},
            )
        ),
    }
)
RULE = closed(
    {"expr": TEXT},
    {
        "alert": TEXT,
        "record": TEXT,
        "for": DURATION,
        "keep_firing_for": DURATION,
        "labels": LABELS,
        "annotations": LABELS,
    },
)
GROUPS = list_of(closed({"name": TEXT, "rules": list_of(RULE)}, {"interval": DURATION}))
TIMED_GROUPS = list_of(closed({"name": TEXT, "rules": list_of(RULE), "interval": DURATION}))  # Google's want it

# https://github.com/GoogleCloudPlatform/prometheus-engine/blob/main/doc/api.md
POD_MONITORING = closed(
    {
        "selector": SELECTOR,
        "endpoints": list_of(closed({"port": TEXT, "interval": DURATION}, {"path": TEXT, "timeout": DURATION})),
    },
    {
        "targetLabels": closed(
            {},
            {
                "metadata": list_of(one_of("pod", "container", "node")),
                "fromPod": list_of(closed({"from": TEXT, "to": TEXT})),
            },
        )
    },
)

# https://cloud.google.com/kubernetes-engine/docs/how-to/configure-gateway-resources
TARGET = closed({"group": {"type": "string"}, "kind": TEXT, "name": TEXT})
BACKEND_POLICY = closed(
    {
        "default": closed(
            {},
            {"timeoutSec": COUNT, "connectionDraining": closed({"drainingTimeoutSec": {**COUNT, "maximum": 3600}})},
        ),
        "targetRef": TARGET,
    }
)
HEALTH_CHECK_POLICY = closed(
    {
        "default": closed(
            {
                "config": closed(
                    {"type": one_of("HTTPS"), "httpsHealthCheck": closed({"port": COUNT, "requestPath": TEXT})}
                )
            },
            {"checkIntervalSec": COUNT, "timeoutSec": COUNT, "healthyThreshold": COUNT, "unhealthyThreshold": COUNT},
        ),
        "targetRef": TARGET,
    }
)

# https://gateway-api.sigs.k8s.io/reference/spec
GATEWAY = closed(
    {
        "gatewayClassName": TEXT,
        "listeners": list_of(
            closed(
                {"name": TEXT, "protocol": one_of("HTTPS"), "port": COUNT},
                {
                    "allowedRoutes": closed({"namespaces": closed({"from": one_of("All", "Same", "Selector")})}),
                    "tls": closed(
                        {"mode": one_of("Terminate")},
                        {"certificateRefs": list_of(closed({"kind": one_of("Secret"), "name": TEXT}))},
                    ),
                },
            )
        ),
    }
)
HTTP_ROUTE = closed(
    {
        "parentRefs": list_of(closed({"kind": one_of("Gateway"), "name": TEXT})),
        "rules": list_of(closed({"backendRefs": list_of(closed({"name": TEXT, "port": COUNT}))})),
    }
)

CUSTOM = dict(
    [
        resource("keda.sh/v1alpha1", "ScaledObject", SCALED_OBJECT),
        resource(
            "keda.sh/v1alpha1", "TriggerAuthentication", closed({"podIdentity": closed({"provider": one_of("gcp")})})
        ),
        resource("monitoring.coreos.com/v1", "ServiceMonitor", SERVICE_MONITOR),
        resource("monitoring.coreos.com/v1", "PrometheusRule", closed({"groups": GROUPS})),
        resource("monitoring.googleapis.com/v1", "PodMonitoring", POD_MONITORING),
        resource("monitoring.googleapis.com/v1", "Rules", closed({"groups": TIMED_GROUPS})),
        resource("networking.gke.io/v1", "GCPBackendPolicy", BACKEND_POLICY),
        resource("networking.gke.io/v1", "HealthCheckPolicy", HEALTH_CHECK_POLICY),
        resource("gateway.networking.k8s.io/v1", "Gateway", GATEWAY),
        resource("gateway.networking.k8s.io/v1", "HTTPRoute", HTTP_ROUTE),
    ]
)
