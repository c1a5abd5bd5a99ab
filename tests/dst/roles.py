"""Who may do what at the simulated server: the roles of deploy/nats, read from its files."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.layout import TENANTS
from tests.dst.nats_server import SYSTEM, May, User

FOLDER = Path(__file__).parents[2] / "deploy" / "nats" / "roles"
_LIST = r"{}:\s*\[(.*?)\]"
_COMMENT = re.compile(r"#[^\n]*")


def users() -> dict[str, User]:
    """By name, which is the password too."""
    found = {"admin": User("admin", May())}
    for role in ("ingress", "placement", "worker", "vault"):
        found[role] = User(role, may_of(role))
    public = may_of("producer-public")
    for tenant in TENANTS:
        own = May(*([_of(tenant, one) for one in some or ()] for some in (public.publish, public.subscribe)))
        found[f"producer-{tenant}"] = User(f"producer-{tenant}", own)
    found["sys"] = User("sys", May((), may_of("sys").subscribe), SYSTEM)
    return found


def may_of(role: str) -> May:
    text = _COMMENT.sub("", (FOLDER / f"{role}.conf").read_text())
    lists = [re.search(_LIST.format(what), text, re.DOTALL) for what in ("publish", "subscribe")]
    return May(*(tuple(re.findall(r'"([^"]+)"', one[1])) if one is not None else None for one in lists))


def _of(tenant: str, subject: str) -> str:
    return ".".join(tenant if word == "public" else word for word in subject.split("."))
