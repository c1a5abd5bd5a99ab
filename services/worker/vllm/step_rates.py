"""How fast vLLM's steps are, from its connector's news. Pure; times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfleet.worker.schedule.step_pacer import TELLING, StepTimes
from kvfleet_vllm.wire import EngineStep
from kvproto.messages import Rates
from kvproto.streams.silence import HUNG_STEPS, UNMEASURED_S

PATIENCE = 4.0  # times what the prompts of the present step should take


@dataclass(eq=False, slots=True)
class StepRates:
    """vLLM tells of a step when it is scheduled, and how long the one before has taken."""

    _times: StepTimes = field(default_factory=StepTimes)
    _before: EngineStep | None = None
    _since: float = 0.0

    def alive(self, now: float) -> None:
        """vLLM told something, or, idle so far, has something to do."""
        self._since = now

    def age(self, now: float) -> float:
        """How long the present step has taken so far, or vLLM's silence since it was asked."""
        return now - self._since

    def observe(self, step: EngineStep, now: float) -> None:
        before, self._before, self._since = self._before, step, now
        if before is not None and step.seconds:
            decodes, prompt = before.tokens - before.prefill_tokens, before.prefill_tokens
            self._times.observe(decodes, prompt, prompt * prompt / 2, step.seconds, now)

    @property
    def patience_s(self) -> float:
        """The present step may take so long before it hangs: vLLM computes thousands of prompt tokens in one."""
        prompt = self._before.prefill_tokens if self._before is not None else 0
        if prompt < TELLING:
            return 0.0
        return PATIENCE * self._times.prompt_seconds(0, prompt) if self._times.prompt_cost[0] else UNMEASURED_S

    def prompt_seconds(self, position: int, tokens: int) -> float:
        """To compute a prompt's tokens from a position on."""
        return self._times.prompt_seconds(position, tokens)

    @property
    def rates(self) -> Rates:
        times = self._times
        steps, tokens = times.decode_steps_per_s, times.decode_tokens_per_s
        step_s = max(times.longest.seconds, self.patience_s / HUNG_STEPS)
        return Rates(times.prefill_tokens_per_s, steps, tokens, step_s=step_s)
