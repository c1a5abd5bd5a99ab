"""The beams of one search as sequences with block tables of their own. Pure; the scheduler's, through their lead.

    lead      prompt [ full | full | part ]        in the queue, admitted, preempted and ended for all its beams at once
                        │      │      └─copied once for each beam but one
    beams             [ shared ...  | tail ]  [ shared ... | tail ]  ...      each a token longer in each step

A beam with several next beams is forked: they share its full blocks, all but one have a copy of the partial one. A beam
with none lets go of its blocks. So there are the tokens in which beams agree once, and the others once for each.

One owner: the lead is a sequence like others, and the only one that the queue, the running list and tenants' shares
know. It counts as `width` sequences. So there is never a part of a search that waits for blocks which another part of
one holds. Which beams go on is `kvsampling.beam_search`'s to say, once all of a step's candidates are there.

No block of a beam is listed in the index before the end: one that is dropped, or found and not returned, is told to
nobody, so that nobody could name its blocks when a session is to be erased. At the end those are listed that the last
beams still have of what is told.

A search that lets go of its blocks, as it is preempted or paused, begins again from its prompt. So does one that moves
to another worker, drained or killed: nothing of it was told before its end, and it finds the same. Of a choice that was
told in part when the worker died, only the rest is told (`engine.beam_answers`).

The further choices of a request follow the first: they have text and an end of their own, and nothing in the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.worker.blocks.content_index import common_prefix
from kvfleet.worker.schedule.block_tables import BlockTables
from kvfleet.worker.schedule.sequence import BeamGroup, Sequence
from kvsampling.draw import Candidates


@dataclass(frozen=True)
class BeamTables:
    tables: BlockTables

    def take(self, lead: Sequence, candidates: Candidates) -> bool:
        """Those of the next beam in order. Returns whether the search is over."""
        group, parents = _group(lead), _present(lead)
        group.found.append(candidates)
        if len(group.found) < len(parents):
            return False
        found, group.found = group.found, []
        branches = group.search.take(found)
        if group.search.over:
            return True
        group.branches = [(parents[branch.parent], branch.token) for branch in branches]
        for at in set(range(len(parents))).difference(branch.parent for branch in branches):
            self.tables.let_go(parents[at], keep_tail=False)
        group.running = [beam for beam in group.running if beam.blocks]
        return False

    def missing(self, lead: Sequence) -> int:
        """How many blocks the next beams need beside those of the present ones."""
        branches = _group(lead).branches
        if not branches:  # the last step was given up
            return 0
        if not branches[0][0].computed % self.tables.pool.block_size:
            return len(branches)
        return len(branches) - len({id(parent) for parent, _ in branches})

    def branch(self, lead: Sequence) -> list[tuple[int, int]]:
        """Make the next beams. Returns the block copies to make first."""
        group, copies = _group(lead), list[tuple[int, int]]()
        branches, group.branches = group.branches, []
        if not branches:
            return copies
        last = {id(parent): at for at, (parent, _) in enumerate(branches)}
        group.running = []
        for at, (parent, _) in enumerate(branches):
            beam = parent
            if last[id(parent)] != at:
                beam, made = self.tables.fork(parent)
                copies += made
            elif parent is lead:
                beam = lead.fork()
                beam.blocks, lead.blocks = lead.blocks, []
                beam.state_slot, lead.state_slot = lead.state_slot, -1
            group.running.append(beam)
        for beam, (_, token) in zip(group.running, branches, strict=True):
            beam.append(token, self.tables.pool.block_size)
            self.tables.extend(beam, 1)
        return copies

    def publish(self, lead: Sequence) -> None:
        """List what the beams at the end have of the found sequences that are told, for the next turn of one."""
        if self.tables.window is not None:
            return
        for found in _group(lead).search.finished[: lead.spec.sampling.n]:
            ids = [*lead.ids, *(beam.token for beam in found.output)]
            agreed, beam = max(((common_prefix(one.ids, ids), one) for one in _present(lead)), key=lambda two: two[0])
            self.tables.publish(beam, agreed)

    def restart(self, lead: Sequence) -> None:
        """Without any beam."""
        group = _group(lead)
        for beam in group.running:
            self.tables.let_go(beam, keep_tail=False)
        group.running, group.branches, group.found = [], [], []
        group.search.restart()


def _group(lead: Sequence) -> BeamGroup:
    assert lead.beams is not None
    return lead.beams


def _present(lead: Sequence) -> list[Sequence]:
    return _group(lead).running or [lead]
