"""What `kvfleet` can be told. It starts services as processes and speaks to them; it imports none of them."""

from __future__ import annotations

from typing import Annotated

import typer

from kvfleet import __version__
from kvfleet.cli.clients import chat, explain, generate, top
from kvfleet.cli.embedded import up
from kvfleet.cli.operator import drain, init
from kvfleet.cli.planning import kv_size, plan
from kvfleet.cli.process_commands import PROCESS_COMMANDS, become
from kvfleet.cli.secrets import key, secrets_command

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
        typer.echo(__version__)
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


def _process(command: str) -> None:
    @app.command(
        command,
        help=PROCESS_COMMANDS[command].told,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def start(context: typer.Context) -> None:
        become(command, context.args)


for _command in PROCESS_COMMANDS:
    _process(_command)
