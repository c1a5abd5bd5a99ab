"""The `kvfleet` command. It starts services as processes and speaks to them; it imports none of them."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from services.cli import chat, drain, explain, generate, init, key, kv_size, plan, secrets_command, top, up

SERVICES = ("worker", "ingress", "placement", "vault")

app = typer.Typer(
    name="kvfleet",
    help="Serves language models from a fleet of workers: attention state is reused wherever it lives.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="One process each, flags or KVFLEET_* variables: kvfleet worker|ingress|placement|vault --help.",
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(metadata.version("kvfleet"))
        raise typer.Exit


app.command("up")(up.up)
app.command("init")(init.init)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("explain")(explain.explain)
app.command("top")(top.top)
app.command("drain")(drain.drain)
app.command("kv-size")(kv_size.kv_size)
app.command("secrets")(secrets_command.secrets)
app.add_typer(key.app)
app.command("plan")(plan.plan)


def _service_command(command: str, module: str, told: str) -> None:
    @app.command(
        command,
        help=told,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def start(context: typer.Context) -> None:
        # The service's own settings class parses the flags: they cannot drift from what it reads.
        os.execv(sys.executable, [sys.executable, "-m", module, *context.args])


for _service in SERVICES:
    _service_command(_service, f"services.{_service}.main", f"Run one {_service} process (settings: --help).")
_service_command(
    "simulate", "services.placement.simulate.main", "Replay a trace or a ledger with other policies (flags: --help)."
)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
