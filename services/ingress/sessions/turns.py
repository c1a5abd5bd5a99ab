"""What a request holds while it runs, and what is kept of it when it has ended: one kind for each generating route.

`open` before its stream starts (again, where it was cut in between), then `commit` when it has finished or `abandon`
when it was cut: the turns of `kvfleet.ingress.runs.runs`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from kvfleet.ingress.prompts.models import ServedModel
from kvfleet.ingress.prompts.prompts import ChatPrompt, Prompts
from kvfleet.ingress.runs.transcript import Transcript
from kvfleet.ingress.sessions.session import OpenTurn, Session
from kvfleet.ingress.sessions.session_index import SessionIndex
from kvfleet.ingress.sessions.sessions import Sessions
from kvfleet.ingress.telemetry.metrics import RequestTally
from kvproto.errors import LimitExceeded, SessionBusy, Unavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionBooks:
    """Where turns are kept (`sessions`), held to each tenant's number (`index`) and counted (`tally`)."""

    sessions: Sessions
    index: SessionIndex
    tally: RequestTally


class PlainTurn:
    """A completion: nothing is held, nothing kept."""

    async def open(self) -> None:
        pass

    async def commit(self, transcript: Transcript) -> None:
        pass

    async def abandon(self, transcript: Transcript) -> None:
        pass


class SessionTurn:
    """A turn of /generate: its session is its own while it runs, and longer when it has finished.

    `history` tokens of `prompt_ids` are the session's, the others this turn's. A repeat of the turn that was committed
    last runs beside the session: what it brings is there already.
    """

    def __init__(
        self,
        books: SessionBooks,
        tenant: str,
        session: Session,
        model: str,
        request: str,
        prompt_ids: tuple[int, ...],
        history: int,
    ) -> None:
        self._books = books
        self._tenant = tenant
        self._session: Session | None = session  # None: it has to be read again
        self._seq_id = session.seq_id
        self._model = model
        self._request = request
        self._prompt_ids = prompt_ids
        self._history = history
        self._held: OpenTurn | None = None

    async def open(self) -> None:
        """Raises SessionBusy while another turn runs, and when one was committed since this one was cut; LimitExceeded
        when the tenant has too many sessions."""
        session = self._session or await self._books.sessions.read(self._tenant, self._seq_id)
        if session.is_last(self._request):
            return
        if session.ids != self._prompt_ids[: self._history]:
            raise SessionBusy(f"session {self._seq_id[:80]!r} has had another turn since this one was cut")
        if session.head is None:
            await self._books.index.admit(self._tenant)
        self._held = await self._books.sessions.lock(session, self._model, self._request)

    async def commit(self, transcript: Transcript) -> None:
        assert transcript.finished is not None
        held, self._held = self._held, None
        if held is None:
            return
        ids = self._prompt_ids + transcript.ids
        try:
            await self._books.sessions.commit(
                held,
                self._model,
                ids,
                transcript.worker,
                start=self._history,
                regions=transcript.regions,
                strays=transcript.strays(ids, self._prompt_ids),
            )
        except BaseException:
            self._held = held
            raise
        self._books.tally.session_turns += 1

    async def abandon(self, transcript: Transcript) -> None:
        held, self._held, self._session = self._held, None, None
        if held is not None and not held.ended:
            strays = transcript.strays(held.session.ids, self._prompt_ids)
            await self._books.sessions.abandon(held, transcript.regions, strays)


class ChatTurn:
    """A turn of a chat: its ids are remembered for the next one, and kept in the session it names, if it names one.

    A session only offers ids here: while another turn runs, or when it grows too long, the chat is not kept.
    """

    def __init__(
        self,
        books: SessionBooks,
        prompts: Prompts,
        tenant: str,
        session: Session | None,
        model: ServedModel,
        request: str,
        prompt: ChatPrompt,
        longest: int,
    ) -> None:
        self._books = books
        self._prompts = prompts
        self._tenant = tenant
        self._session = session if session is not None and books.sessions.fits(longest) else None
        self._model = model
        self._request = request
        self._prompt = prompt
        self._held: OpenTurn | None = None
        self._cut = False

    async def open(self) -> None:
        if self._session is None:
            return
        with _kept_if_possible(self._session):
            if self._cut:
                self._session = await self._books.sessions.read(self._tenant, self._session.seq_id)
            if self._session.is_last(self._request):
                return
            if self._session.head is None:
                await self._books.index.admit(self._tenant)
            self._held = await self._books.sessions.lock(self._session, self._model.name, self._request)

    async def commit(self, transcript: Transcript) -> None:
        assert transcript.finished is not None
        self._prompts.remember(self._model, self._tenant, self._prompt, transcript.ids)
        held, self._held = self._held, None
        if held is None:
            return
        with _kept_if_possible(held.session):
            ids = self._prompt.ids + transcript.ids
            strays = transcript.strays(ids, self._prompt.ids)
            worker, regions = transcript.worker, transcript.regions
            await self._books.sessions.commit(held, self._model.name, ids, worker, regions=regions, strays=strays)
            self._books.tally.session_turns += 1
        if not held.ended:
            await self._abandon_held(held, transcript)

    async def abandon(self, transcript: Transcript) -> None:
        held, self._held, self._cut = self._held, None, True
        if held is not None and not held.ended:
            await self._abandon_held(held, transcript)

    async def _abandon_held(self, held: OpenTurn, transcript: Transcript) -> None:
        strays = transcript.strays(held.session.ids, self._prompt.ids)
        await self._books.sessions.abandon(held, transcript.regions, strays)


@contextlib.contextmanager
def _kept_if_possible(session: Session) -> Iterator[None]:
    """Around the session of a chat: it is a service to the next turn, and never fails this one."""
    try:
        yield
    except (SessionBusy, LimitExceeded, Unavailable) as error:
        log.info("session %s: this chat is not kept: %s", session.key, error)
