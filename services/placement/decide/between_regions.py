"""What placement does with requests that cross regions: it refers them, or says who here holds a prompt. Pure."""

from __future__ import annotations

from kvfleet.placement.decide.admission import limit_of
from kvfleet.placement.decide.decider import Decider
from kvfleet.placement.decide.state import PlacementState
from kvfleet.placement.events import GenerateAsked
from kvfleet.placement.policies import DIRECT
from kvproto.errors import ModelNotFound, NoWorkers, Overloaded
from kvproto.messages import Placement, PlaceRequest

CANNOT_SERVE = (NoWorkers, Overloaded, ModelNotFound)


class BetweenRegions:
    """Owned by the core; keeps nothing of its own."""

    def __init__(self, state: PlacementState, decider: Decider) -> None:
        self._state = state
        self._decider = decider

    def refer(self, tenant: str, ask: PlaceRequest, now: float, *, refused: bool = False) -> Placement | None:
        """The region that should have the request, and who here has blocks for it; None: it stays. `refused`: nobody
        here may take it."""
        if not self._state.region_summaries.regions.own or ask.policy == DIRECT or ask.worker:
            return None
        wait_s = None if refused else self._decider.least_wait_s(ask, now)
        if wait_s is None and not refused:
            return None  # the decision says why nobody can
        if ask.excluded_regions:
            self._state.region_summaries.refused(self._decider.holder(tenant, ask)[2])
        region = self._state.region_summaries.refer(ask.model, wait_s, ask.excluded_regions, now)
        if region is None:
            return None
        if not refused:  # else it is counted already
            self._decider.note_referred(tenant, ask, now)
        source, tokens, hashes = self._decider.holder(tenant, ask)
        self._state.region_summaries.trace(hashes, region, now)
        here = f"{wait_s:.1f} s to wait here" if wait_s is not None else "nobody here can take it"
        return Placement(
            ask.request, "", ask.attempt, why=here, placement=self._state.placement, region=region,
            source=source, source_tokens=tokens,
        )  # fmt: skip

    def source_of(self, tenant: str, ask: PlaceRequest) -> Placement:
        """Who here holds most of the prompt, for a worker of another region."""
        source, tokens, _ = self._decider.holder(tenant, ask)
        return Placement(ask.request, "", placement=self._state.placement, attempt=ask.attempt,
                         source=source, source_tokens=tokens)  # fmt: skip

    def region_for(self, event: GenerateAsked, model: str, max_wait_s: float | None, now: float) -> str | None:
        """Where a bare producer's request should go, if not to a worker here."""
        if not self._state.region_summaries.regions.own:
            return None
        ask = event.ask
        asked = PlaceRequest(event.request, model, ask.prompt_ids, ask.prompt, priority=min(ask.priority, 0))
        wait_s = self._decider.least_wait_s(asked, now)
        late = wait_s is not None and max_wait_s is not None and wait_s > limit_of(max_wait_s, asked.priority)
        region = self._state.region_summaries.refer(model, None if late else wait_s, (), now)
        if region is not None:
            self._decider.note_referred(event.tenant, asked, now)
        return region
