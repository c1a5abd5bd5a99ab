"""Steps are timed by the device's own events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvfleet.worker.model.gpu.step_timer import StepTimer


@dataclass(eq=False)
class Device:
    """Its clock, and events on it that are waited for."""

    now_ms: float = 0.0
    waited: int = 0

    def event(self) -> Event:
        return Event(self)


@dataclass(eq=False)
class Event:
    device: Device
    at_ms: float = field(default=-1.0)

    def record(self) -> None:
        self.at_ms = self.device.now_ms

    def synchronize(self) -> None:
        self.device.waited += 1

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_passes_count_until_they_are_asked_for_and_what_is_between_them_does_not() -> None:
    device = Device()
    timer = StepTimer(device.event)
    assert timer.take() is None
    for took in (5.0, 7.0):
        timer.begin()
        device.now_ms += took
        timer.end()
        device.now_ms += 100.0
    assert timer.take() == pytest.approx(0.012)
    assert device.waited == 2
    assert timer.take() is None


def test_a_pass_that_goes_on_counts_once_and_one_that_failed_does_not() -> None:
    device = Device()
    timer = StepTimer(device.event)
    timer.begin()
    device.now_ms += 50.0  # and raised
    timer.begin()
    device.now_ms += 5.0
    timer.end()
    device.now_ms += 3.0  # scores
    timer.end()
    assert timer.take() == pytest.approx(0.008)


def test_without_a_gpu_nothing_is_measured() -> None:
    timer = StepTimer()
    timer.begin()
    timer.end()
    assert timer.take() is None
