"""Limits across all ingresses of a region. Pure: time is passed in; `shared_usage_exchange` carries the reports.

Every ingress fills its buckets at the full rate, counts what it admits, and takes from them what the others report; so
all buckets agree, but for what was admitted since the last reports.

    Account (of `limits`) ── touched, or a second has passed ──▶ AccountUsage: how far it has counted ──▶ all others
    AccountUsage of another ── less what it had reported before ──▶ taken from the Account here, opened for it

Counts only grow within a `life` of an account, so the next report heals lost, doubled and overtaken ones. An account
that equals a new one ends its life, and is reported no more. `running` counts for `SILENT_S` after its last report. Of
what was counted before this ingress listened it takes what the report says is lacking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter

from kvfleet.ingress.limits.callers import KeyLimits
from kvfleet.ingress.limits.limiter import DAY_S, ROUNDING, Account, Key, Limiter
from kvproto.messages import AccountUsage, UsageReport

REFRESH_S = 1.0  # what was reported is reported again, with what was generated since, and in case it was lost
SILENT_S = 3.0
FORGET_S = 600.0
MAX_REPORTED = 512  # accounts at once: those that were reported longest ago
MAX_REPEATED = 64  # of these, accounts of which nothing is new
FORMER_KEPT = 8  # lives of one ingress whose late reports are known as such
MAX_PEERS = 256
MAX_PEER_ACCOUNTS = 65_536  # accounts, of all peers together
ENTRY_BYTES = 400  # at most, beside the names


@dataclass(slots=True)
class PeerUsage:
    """How far another ingress has counted one account."""

    life: int
    seq: int  # of the report with what follows
    at: float
    running: int = 0
    requests: int = 0
    tokens: int = 0
    day: int = 0
    day_tokens: int = 0

    def more(self, entry: AccountUsage, today: int) -> tuple[int, int, int]:
        """Requests, tokens, and tokens of today that are new in an entry; 0 of one that was overtaken."""
        requests, tokens = max(0, entry.requests - self.requests), max(0, entry.tokens - self.tokens)
        self.requests += requests
        self.tokens += tokens
        day_tokens = 0
        if entry.day == today:
            if self.day != today:
                self.day, self.day_tokens = today, 0
            day_tokens = max(0, entry.day_tokens - self.day_tokens)
            self.day_tokens += day_tokens
        return requests, tokens, day_tokens


@dataclass(slots=True)
class Peer:
    """One life of another ingress. Its accounts born after `since` had counted nothing before their first report;
    reports before `forgot_seq` may be of accounts that are over."""

    epoch: str
    since: float
    reported_at: float
    former: tuple[str, ...] = ()  # its lives before
    forgot_seq: int = -1
    accounts: dict[Key, PeerUsage] = field(default_factory=dict)  # the one reported longest ago comes first
    running: dict[Key, PeerUsage] = field(default_factory=dict)  # those of them where something runs


@dataclass(eq=False, slots=True)
class SharedUsage:
    """Owned by the event loop, as is the limiter. `ingress` and `epoch` are this process's; `now` is the time of the
    last call, at first of its start."""

    limiter: Limiter
    ingress: str
    epoch: str
    now: float
    refused_total: int = 0  # reports, or accounts in one, for which there was no room or no reason
    _peers: dict[str, Peer] = field(default_factory=dict)
    _peer_accounts: int = 0
    _since: float = field(init=False)
    _seq: int = 0
    _lives: int = 0
    _reported_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self._reported_at = self.now  # all that was counted before

    @property
    def peers(self) -> int:
        """How many reported a moment ago."""
        return sum(1 for peer in self._peers.values() if self.now - peer.reported_at <= SILENT_S)

    def reports(self, now: float, unix_s: float, max_bytes: int) -> list[UsageReport]:
        """For the others, each at most `max_bytes` long; empty while no limit is in use."""
        self.now = now
        found: list[list[AccountUsage]] = []
        size = math.inf
        for account in self._due(now):
            entry = self._entry(account, now, unix_s)
            if entry is None:
                continue
            more = ENTRY_BYTES + 4 * (len(entry.tenant) + len(entry.caller))
            if size + more > max_bytes:
                found.append([])
                size = ENTRY_BYTES
            found[-1].append(entry)
            size += more
        self._reported_at = now
        first, self._seq = self._seq + 1, self._seq + len(found)
        return [UsageReport(self.ingress, self.epoch, seq, tuple(said)) for seq, said in enumerate(found, first)]

    def report_again(self) -> None:
        """A peer missed the last reports."""
        for account in self.limiter.every():
            account.reported_at = -math.inf

    def _due(self, now: float) -> list[Account]:
        changed: list[Account] = []
        repeated: list[Account] = []
        for account in self.limiter.every():
            is_old = account.life > 0 and now - account.reported_at >= REFRESH_S
            if account.touched or (is_old and account.running):
                changed.append(account)
            elif is_old:
                repeated.append(account)
        for found, most in ((changed, MAX_REPORTED), (repeated, MAX_REPEATED)):
            if len(found) > most:
                found.sort(key=attrgetter("reported_at"))
        room = min(MAX_REPEATED, max(0, MAX_REPORTED - len(changed)))
        return [*changed[:MAX_REPORTED], *repeated[:room]]

    def _entry(self, account: Account, now: float, unix_s: float) -> AccountUsage | None:
        """None for one that equals a new one."""
        account.touched = False
        limits = account.limits
        requests, tokens = account.requests.lacking(now, 0.0), account.tokens.lacking(now, account.generated)
        is_today = account.day == int(unix_s // DAY_S)
        day_tokens = account.day_tokens + account.generated if limits.tokens_per_day and is_today else 0
        is_used = bool(requests > ROUNDING or tokens > ROUNDING or day_tokens)
        ended = not account.running and not is_used  # what runs is reported to its end, limited no more or not
        if not account.life:
            if ended or not limits.are_counted:
                _start_anew(account, now, unix_s)
                return None
            self._lives += 1
            account.life, account.born_at = self._lives, self._reported_at
        account.reported_at = now
        tenant, caller = account.key
        entry = AccountUsage(
            tenant,
            account.life,
            caller,
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            tokens_per_day=limits.tokens_per_day,
            age_s=now - account.born_at,
            running=account.running,
            requests=account.asked,
            tokens=account.spent + account.generated,
            day=account.day,
            day_tokens=account.own_day_tokens + account.generated,
            lacking_requests=requests,
            lacking_tokens=tokens,
            lacking_day_tokens=day_tokens,
            ended=ended,
        )
        if ended:
            _start_anew(account, now, unix_s)
        return entry

    def receive(self, report: UsageReport, now: float, unix_s: float) -> None:
        self.now = now
        if report.ingress == self.ingress:
            return
        peer = self._peer(report, now)
        if peer is None:
            self.refused_total += 1
            return
        for entry in report.accounts:
            self._take(peer, report.seq, entry, now, unix_s)
        peer.reported_at = now

    def expire(self, now: float) -> None:
        """A silent ingress has nothing running."""
        self.now = now
        for name, peer in list(self._peers.items()):
            for key, known in list(peer.running.items()):
                if now - known.at > SILENT_S:
                    self._runs(peer, key, known, 0)
            if now - peer.reported_at > FORGET_S:
                self._forget_peer(name, now)
            while peer.accounts:
                key, known = next(iter(peer.accounts.items()))
                if now - known.at <= FORGET_S:
                    break
                peer.since = now
                self._forget(peer, key, known)

    def _peer(self, report: UsageReport, now: float) -> Peer | None:
        known = self._peers.get(report.ingress)
        if known is not None and known.epoch == report.epoch:
            return known
        if known is not None:
            if report.epoch in known.former and now - known.reported_at <= SILENT_S:
                return None  # of a life that is over
            self._forget_peer(report.ingress, now, counted=False)
        elif len(self._peers) >= MAX_PEERS and not self._forget_longest_silent(now):
            return None
        self.report_again()  # it may not have received anything yet
        former = (*known.former[1 - FORMER_KEPT :], known.epoch) if known is not None else ()
        peer = self._peers[report.ingress] = Peer(report.epoch, self._since, now, former)
        return peer

    def _take(self, peer: Peer, seq: int, entry: AccountUsage, now: float, unix_s: float) -> None:
        key = entry.tenant, entry.caller
        known, gap_s, is_older = peer.accounts.get(key), entry.age_s, False
        if known is None and (entry.ended or seq < peer.forgot_seq):
            return
        account = self.limiter.find(key)
        if account is None:  # no request here has used it: its limits are known as far as they are needed
            limits = KeyLimits(0, entry.requests_per_minute, entry.tokens_per_minute, entry.tokens_per_day)
            account = self.limiter.open(key, limits, now, unix_s)
        if account is None or (known is None and self._peer_accounts >= MAX_PEER_ACCOUNTS):
            self.refused_total += 1
            peer.since = now
            if known is not None:
                self._forget(peer, key, known)
            return
        if known is None:
            is_older = entry.age_s > now - peer.since
            self._peer_accounts += 1
            known = peer.accounts[key] = PeerUsage(entry.life, seq - 1, now)
        elif entry.life < known.life:
            return
        elif entry.life > known.life:
            known.life, known.requests, known.tokens, known.day_tokens = entry.life, 0, 0, 0
        else:
            gap_s = now - known.at
        requests, tokens, day_tokens = known.more(entry, int(unix_s // DAY_S))
        if is_older:
            of_day = entry.lacking_day_tokens if known.day == entry.day else 0
            account.known_elsewhere(entry.lacking_requests, entry.lacking_tokens, of_day, now, unix_s)
        elif requests or tokens or day_tokens:
            account.used_elsewhere(requests, tokens, now, unix_s, late=gap_s > SILENT_S)
            account.day_tokens += day_tokens
        if account.limits.tokens_per_day and account.day_tokens and not account.life:
            account.touched = True  # an ingress that comes next learns of the day from those that are left
        if seq > known.seq:
            known.seq, known.at = seq, now
            peer.accounts[key] = peer.accounts.pop(key)
            self._runs(peer, key, known, entry.running)
            if entry.ended:
                self._forget(peer, key, known)

    def _runs(self, peer: Peer, key: Key, known: PeerUsage, running: int) -> None:
        account = self.limiter.find(key)
        if account is not None:
            account.running_elsewhere += running - known.running
        known.running = running
        if running:
            peer.running[key] = known
        else:
            peer.running.pop(key, None)

    def _forget(self, peer: Peer, key: Key, known: PeerUsage) -> None:
        self._runs(peer, key, known, 0)
        peer.forgot_seq = max(peer.forgot_seq, known.seq)
        del peer.accounts[key]
        self._peer_accounts -= 1

    def _forget_peer(self, name: str, now: float, *, counted: bool = True) -> None:
        """`counted`: it may come back with counts that are taken already."""
        peer = self._peers.pop(name)
        for key, known in list(peer.accounts.items()):
            self._forget(peer, key, known)
        if counted:
            self._since = now

    def _forget_longest_silent(self, now: float) -> bool:
        name, peer = min(self._peers.items(), key=lambda one: one[1].reported_at)
        if now - peer.reported_at <= SILENT_S:
            return False
        self._forget_peer(name, now)
        return True

    def check_integrity(self) -> None:
        self.limiter.check_integrity()
        for account in self.limiter.every():
            assert account.running_elsewhere == sum(
                peer.running[account.key].running for peer in self._peers.values() if account.key in peer.running
            )
        for peer in self._peers.values():
            assert peer.running == {key: known for key, known in peer.accounts.items() if known.running}
        assert self._peer_accounts == sum(len(peer.accounts) for peer in self._peers.values()) <= MAX_PEER_ACCOUNTS


def _start_anew(account: Account, now: float, unix_s: float) -> None:
    account.settle(now, unix_s)
    account.asked = account.spent = account.own_day_tokens = 0
    account.life, account.reported_at = 0, -math.inf
