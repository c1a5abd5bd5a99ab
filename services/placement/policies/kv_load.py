"""What a worker holds of the prompt minus how loaded it is, as shares. Pure.

The rule of NVIDIA Dynamo's first KV router: of three workers with matches of 15, 50 and 75 % and loads of 30, 50 and
80 %, the second is chosen, at 0. Kept to compare with; `cost` reckons in seconds instead of adding unlike shares.
"""

from __future__ import annotations

import numpy as np

from kvfleet.placement.policies.base import Choice, Question


class KvLoad:
    """Highest match minus load; equals go to the first on the ring."""

    name = "kv_load"

    def choose(self, question: Question) -> Choice | None:
        if not question.candidates:
            return None
        match = question.held / max(question.prompt_tokens, 1)
        load = np.maximum(question.loads.slot_usage, question.loads.cache_usage)
        score = match - load
        best = {question.candidates[int(i)].id: int(i) for i in np.flatnonzero(score >= score.max() - 1e-9)}
        worker = next(name for name in question.ring.walk(question.demand_keeper) if name in best)
        number = best[worker]
        return Choice(worker, f"match {match[number]:.0%} minus load {load[number]:.0%} is the most")
