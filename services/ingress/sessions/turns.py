"""Turns of sessions: what a /generate request or a chat holds while it runs (`runs.jobs.HeldTurn`), and keeps when it
has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from kvfleet.ingress.prompts.models import ServedModel
from kvfleet.ingress.prompts.prompts import ChatPrompt, Prompts
from kvfleet.ingress.runs.jobs import HeldTurn
from kvfleet.ingress.runs.transcript import Transcript
from kvfleet.ingress.sessions.session import OpenTurn, Session
from kvfleet.ingress.sessions.session_index import SessionIndex
from kvfleet.ingress.sessions.sessions import COMMIT_RETRY_S
from kvproto.errors import LimitExceeded, SessionBusy, Unavailable

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class SessionTurn(HeldTurn):
    """A turn of /generate, which holds its session while it runs.

    The first `history` of `prompt_ids` are the session's; None for a turn that may replace the history. A repeat of the
    turn that was committed last holds nothing: the session has its tokens already.
    """

    index: SessionIndex
    tenant: str
    session: Session
    model: str
    request: str
    prompt_ids: tuple[int, ...]
    history: int | None
    _cut: bool = False  # so the session has to be read again
    _held: OpenTurn | None = None

    async def open(self) -> None:
        """Raises SessionBusy while another turn runs, or if one was committed since this one was cut; LimitExceeded for
        too many sessions of the tenant; Unavailable without JetStream, for which a turn that was cut waits as long as a
        commit does: its readers have its beginning."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (self.index.sessions.limits.commit_timeout_s if self._cut else 0.0)
        while True:
            try:
                return await self.open_at_once()
            except Unavailable:
                if loop.time() >= until:
                    raise
            await asyncio.sleep(COMMIT_RETRY_S)

    async def open_at_once(self) -> None:
        """As `open`, without waiting."""
        if self._cut:
            self.session = await self.index.sessions.read(self.tenant, self.session.seq_id)
        session = self.session
        if session.is_last(self.request):
            return
        if self.history is not None and session.ids != self.prompt_ids[: self.history]:
            raise SessionBusy(f"session {session.seq_id[:80]!r} has had another turn since this one was cut")
        if session.head is None:
            await self.index.admit(self.tenant)
        self._held = await self.index.sessions.lock(session, self.model, self.request)

    async def commit(self, transcript: Transcript) -> None:
        assert transcript.finished is not None
        held = self._held
        if held is None:
            return
        ids = self.prompt_ids + transcript.ids
        await self.index.sessions.commit(
            held,
            self.model,
            ids,
            transcript.worker,
            start=self.history or 0,
            regions=transcript.regions,
            strays=transcript.strays(ids, self.prompt_ids),
        )
        self._held = None

    async def abandon(self, transcript: Transcript) -> None:
        held, self._held, self._cut = self._held, None, True
        if held is not None and not held.ended:
            strays = transcript.strays(held.session.ids, self.prompt_ids)
            await self.index.sessions.abandon(held, transcript.regions, strays)


@dataclass(eq=False, slots=True)
class ChatTurn(HeldTurn):
    """A turn of a chat: its ids are remembered for the next one, and `kept` in the session that it names. The session
    only offers ids: while another turn runs, or when it grows too long, the chat is not kept."""

    prompts: Prompts
    tenant: str
    model: ServedModel
    prompt: ChatPrompt
    kept: SessionTurn | None

    async def open(self) -> None:
        if self.kept is not None:
            with _kept_if_possible(self.kept.session):
                await self.kept.open_at_once()

    async def commit(self, transcript: Transcript) -> None:
        self.prompts.remember(self.model, self.tenant, self.prompt, transcript.ids)
        if self.kept is not None:
            with _kept_if_possible(self.kept.session):
                await self.kept.commit(transcript)
            await self.kept.abandon(transcript)

    async def abandon(self, transcript: Transcript) -> None:
        if self.kept is not None:
            await self.kept.abandon(transcript)


@contextlib.contextmanager
def _kept_if_possible(session: Session) -> Iterator[None]:
    """The session of a chat never fails its turn."""
    try:
        yield
    except (SessionBusy, LimitExceeded, Unavailable) as error:
        log.info("session %s: this chat is not kept: %s", session.key, error)
