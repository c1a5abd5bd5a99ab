"""As `test_random_schedules`, with beam searches among the requests: they find what each finds alone."""

from __future__ import annotations

from dataclasses import replace

from engine_rig import expected_beams, spec
from test_random_schedules import Key, Schedule

from kvproto.errors import InvalidRequest, KvfleetError, OutOfMemory
from kvproto.messages import Beams, EarlyStopping, FinishReason, Sampling

SCHEDULES = 600


class SearchingSchedule(Schedule):
    def arrive(self, name: str) -> None:
        if self.context != 64 or self.chance.random() < 0.4:
            super().arrive(name)
            return
        chance = self.chance
        beams = Beams(chance.randint(1, 5), chance.choice([0.0, 1.0, -1.0]), chance.choice(list(EarlyStopping)))
        stop_ids = chance.choice([(), (2,), (0, 3)])
        sampling = Sampling(
            chance.randint(1, 10), n=chance.randint(1, beams.width), beams=beams, stop_ids=stop_ids,
            min_tokens=chance.choice([0, 0, 3]),
        )  # fmt: skip
        if sampling.min_tokens > sampling.max_tokens:
            sampling = replace(sampling, min_tokens=0)
        prompt = [*chance.choice(self.stems)[: chance.randint(1, 20)], chance.randrange(3)]
        recurrent = self.engine.runner.num_states > 0
        found = expected_beams(
            prompt, sampling, vocab_size=5, stop_ids=stop_ids, window=self.window, recurrent=recurrent
        )
        deadline = self.clock.now + chance.choice([0.03, 0.3, 30.0]) if chance.random() < 0.2 else None
        resumed, priority, tenant = chance.random() < 0.3, chance.choice([0, 0, 1, 3]), chance.choice("abc")
        for choice in range(sampling.n):
            told = tuple(beam.token for beam in found[choice].output)
            done = told[: chance.randint(0, len(told))] if resumed else ()
            asked = spec(
                name, prompt, sampling=sampling, choice=choice, output_ids=done, attempt=int(resumed),
                priority=priority, deadline=deadline, tenant=tenant,
            )  # fmt: skip
            try:
                self.engine.add(asked)
            except OutOfMemory:
                return
            except InvalidRequest:
                assert beams.width > self.engine.scheduler.slots
                return
            self.specs[name, choice] = asked
            self.expected[name, choice] = list(told[len(done) :])

    def progress(self) -> tuple[int, int, int]:
        """A search tells nothing before its end."""
        scheduler = self.engine.scheduler
        return (*super().progress()[:2], self.transcript.fed + scheduler.preemptions)

    def check_end(self, key: Key, end: FinishReason | KvfleetError) -> None:
        asked = self.specs[key]
        if isinstance(end, OutOfMemory) and asked.sampling.beams is not None:
            assert self.transcript.tokens[key] == []
            tokens = len(asked.prompt_ids) + asked.sampling.max_tokens
            most = asked.sampling.at_once * (self.engine.scheduler.tables.at_once(tokens) + 1)
            assert most > self.engine.pool.num_blocks or self.memory_errors
            return
        super().check_end(key, end)


def test_random_beams() -> None:
    searched = preempted = 0
    for seed in range(SCHEDULES):
        schedule = SearchingSchedule(seed)
        try:
            schedule.run()
            schedule.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        preempted += schedule.engine.scheduler.preemptions
        searched += sum(
            schedule.specs[key].sampling.beams is not None and bool(tokens)
            for key, tokens in schedule.transcript.tokens.items()
        )
    assert searched > 300
    assert preempted > 100
