"""`kvfleet key new`: what it prints is what an ingress reads, and the key is printed once."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from kvfleet.cli.commands import app
from kvfleet.ingress.auth.api_keys import parse_keys
from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.limits.callers import KeyLimits
from kvproto.errors import AuthenticationFailed


def new(*flags: str) -> tuple[str, str]:
    """The entry and the key."""
    result = CliRunner().invoke(app, ["key", "new", *flags])
    assert result.exit_code == 0, result.output
    key = result.stderr.removeprefix("key (shown once): ").strip()
    assert key.startswith("kvf_")
    assert len(key) > 40
    assert key not in result.stdout
    return result.stdout, key


async def test_its_entry_lets_it_in() -> None:
    entry, key = new("--tenant", "search")
    admin_entry, admin = new("--admin", "--name", "ops", "--tokens-per-minute", "500", "--not-after", "2999-01-02")
    tenancy = Tenancy(parse_keys(entry + admin_entry), time.time)
    caller = await tenancy.authenticate(f"Bearer {key}")
    assert (caller.tenant, caller.admin, caller.limits) == ("search", False, KeyLimits())
    assert caller.name.startswith("search-")
    boss = await tenancy.authenticate(f"Bearer {admin}")
    assert (boss.name, boss.tenant, boss.admin) == ("ops", "public", True)
    assert boss.limits.tokens_per_minute == 500
    with pytest.raises(AuthenticationFailed, match="expired"):
        await Tenancy(parse_keys(admin_entry), lambda: 40e9).authenticate(f"Bearer {admin}")


def test_no_two_are_alike() -> None:
    assert len({new()[1] for _ in range(5)}) == 5


@pytest.mark.parametrize(
    "flags", [("--tenant", "a.b"), ("--name", 'x"\ny'), ("--not-after", "soon"), ("--max-tokens", "-1")]
)
def test_what_it_refuses(flags: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["key", "new", *flags])
    assert result.exit_code == 2
    assert "kvf_" not in result.output
