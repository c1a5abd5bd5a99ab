"""The beams of one search as sequences with block tables of their own. Pure; the scheduler's, through their lead.

    lead      prompt [ full | full | part ]        in the queue, admitted, preempted and ended for all its beams at once
                        │      │      └─copied once for each beam but one
    beams             [ shared ...  | tail ]  [ shared ... | tail ]  ...      each a token longer in each step

A beam with several next beams is forked: they share its full blocks, all but one have a copy of the partial one. A beam
with none lets go of its blocks. So there are the tokens in which beams agree once, and the others once for each.

A search that lets go of its blocks, as it is preempted or paused, begins again from its prompt. So does one that moves
to another worker: nothing of it was told, and it finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfleet.worker.schedule.block_tables import BlockTables
from kvfleet.worker.schedule.sequence import Sequence
from kvsampling.beam_search import BeamSearch
from kvsampling.draw import Candidates


@dataclass(eq=False, slots=True)
class BeamGroup:
    search: BeamSearch
    running: list[Sequence] = field(default_factory=list)  # none before the prompt is computed
    _branches: list[tuple[Sequence, int]] = field(default_factory=list)  # the next beams: whose, and their token
    _found: list[Candidates] = field(default_factory=list)  # in this step, of the first beams

    @property
    def has_begun(self) -> bool:
        return bool(self.running or self._branches)

    def take(self, lead: Sequence, candidates: Candidates, tables: BlockTables) -> bool:
        """Those of the next beam in order. Returns whether the search is over."""
        parents = self.running or [lead]
        self._found.append(candidates)
        if len(self._found) < len(parents):
            return False
        found, self._found = self._found, []
        branches = self.search.take(found)
        if self.search.over:
            return True
        self._branches = [(parents[branch.parent], branch.token) for branch in branches]
        for at in set(range(len(parents))).difference(branch.parent for branch in branches):
            tables.let_go(parents[at], keep_tail=False)
        self.running = [beam for beam in self.running if beam.blocks]
        return False

    def missing(self, block_size: int) -> int:
        """How many blocks the next beams need beside those of the present ones."""
        if not self._branches:
            return 0
        if not self._branches[0][0].computed % block_size:
            return len(self._branches)
        return len(self._branches) - len({id(parent) for parent, _ in self._branches})

    def branch(self, lead: Sequence, tables: BlockTables) -> list[tuple[int, int]]:
        """Make the next beams. Returns the block copies to make first."""
        copies: list[tuple[int, int]] = []
        branches, self._branches = self._branches, []
        if not branches:  # the last step was given up
            return []
        last = {id(parent): at for at, (parent, _) in enumerate(branches)}
        self.running = []
        for at, (parent, _) in enumerate(branches):
            if last[id(parent)] != at:
                beam, made = tables.fork(parent)
                copies += made
            elif parent is lead:
                beam = lead.fork()
                beam.blocks, lead.blocks = lead.blocks, []
            else:
                beam = parent
            self.running.append(beam)
        for beam, (_, token) in zip(self.running, branches, strict=True):
            beam.append(token, tables.pool.block_size)
            tables.extend(beam, 1)
        return copies

    def restart(self, tables: BlockTables) -> None:
        """Without any beam."""
        for beam in self.running:
            tables.let_go(beam, keep_tail=False)
        self.running, self._branches, self._found = [], [], []
        self.search.restart()
