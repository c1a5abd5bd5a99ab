"""The commands of `kvfleet`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvfleet import __version__
from kvfleet.cli.bench import bench
from kvfleet.cli.clients import chat, explain, generate, top
from kvfleet.cli.embedded import up
from kvfleet.cli.main import PROCESS_COMMANDS, become
from kvfleet.cli.operator import drain, init, lora, scale
from kvfleet.cli.paper import paper
from kvfleet.cli.planning import kv_size, plan
from kvfleet.cli.secrets import key, secrets_command


class TwoWordCommands(TyperGroup):
    """A command of two words goes before one of the first word, which takes what follows as its argument."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = " ".join(args[:2])
        return super().resolve_command(ctx, [words, *args[2:]] if len(args) > 1 and words in self.commands else args)


app = typer.Typer(
    name="kvfleet",
    cls=TwoWordCommands,
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


for _command in (
    up.up, init.init, generate.generate, chat.chat, explain.explain, top.top, drain.drain, scale.scale, lora.lora,
    kv_size.kv_size, secrets_command.secrets, plan.plan, bench.bench,
):  # fmt: skip
    app.command()(_command)
app.command("bench paper")(paper.paper)
app.add_typer(key.app)


def start(context: typer.Context) -> None:
    assert context.info_name is not None
    become(context.info_name, context.args)


for _name, _process in PROCESS_COMMANDS.items():
    app.command(
        _name,
        help=_process.told,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(start)
