"""How fast vLLM's steps are, from its connector's news. Pure; times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfleet.worker.schedule.step_pacer import StepTimes
from kvfleet_vllm.wire import EngineStep
from kvproto.messages import Rates


@dataclass(eq=False, slots=True)
class StepRates:
    """vLLM tells of a step when it is scheduled, and how long the one before has taken."""

    _times: StepTimes = field(default_factory=StepTimes)
    _before: EngineStep | None = None
    _since: float = 0.0
    _owes: bool = False  # a step was begun, or asked for, and no token came since

    def asked(self, now: float) -> None:
        if not self._owes:
            self._since, self._owes = now, True

    def answered(self) -> None:
        """A token came."""
        self._owes = False

    def age(self, now: float) -> float:
        """How long the present step has taken so far, or vLLM's silence since it was asked. It goes on where nobody
        waits for the step any more: a vLLM that hangs should be noticed."""
        return now - self._since if self._owes else 0.0

    def observe(self, step: EngineStep, now: float) -> None:
        before, self._before, self._since, self._owes = self._before, step, now, True
        if before is not None and step.seconds:
            decodes, prompt = before.tokens - before.prefill_tokens, before.prefill_tokens
            self._times.observe(decodes, prompt, prompt * prompt / 2, step.seconds, now)

    def prompt_seconds(self, position: int, tokens: int) -> float:
        """To compute a prompt's tokens from a position on."""
        return self._times.prompt_seconds(position, tokens)

    @property
    def rates(self) -> Rates:
        times = self._times
        steps, tokens = times.decode_steps_per_s, times.decode_tokens_per_s
        return Rates(times.prefill_tokens_per_s, steps, tokens, step_s=times.longest.seconds)
