"""The autoscaling signals as Prometheus reads them: a series per model, from the moment it is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvfleet.placement.advice.autoscaler import Autoscaler
from kvproto.messages import ModelSignals
from kvservice.metrics import Reading

PER_MODEL = ("model",)
PARTS = ("work", "queue", "slots", "blocks")


def autoscale_readings(autoscaler: Autoscaler) -> list[Reading]:
    def of(name: str, help_: str, value: Callable[[ModelSignals], float]) -> Reading:
        def read() -> Mapping[tuple[str, ...], float]:
            return {(one.model,): value(one) for one in autoscaler.signals()}

        return Reading(name, help_, labels=PER_MODEL, read_labelled=read)

    def parts() -> Mapping[tuple[str, ...], float]:
        return {(one.model, part): one.parts.get(part, 0.0) for one in autoscaler.signals() for part in PARTS}

    return [
        of(
            "kvfleet_model_queue_depth_requests",
            "requests that wait at workers, are on their way there, or were refused just now",
            lambda one: one.queue_depth,
        ),
        of(
            "kvfleet_model_oldest_wait_seconds",
            "how long the oldest of those that wait has waited",
            lambda one: one.oldest_wait_s,
        ),
        of(
            "kvfleet_model_saturation_ratio",
            "work to be done, of what the model's ready workers can do within the TTFT target",
            lambda one: one.saturation,
        ),
        of("kvfleet_model_desired_replicas", "workers that the model should have", lambda one: one.desired),
        of("kvfleet_model_ready_replicas", "workers of the model that take work", lambda one: one.ready),
        Reading(
            "kvfleet_model_needed_replicas",
            "workers that would just be busy, by what is to be done; the largest part counts",
            labels=("model", "part"),
            read_labelled=parts,
        ),
    ]
