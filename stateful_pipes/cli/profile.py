"""`stateful-pipes profile`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stateful_pipes.cli.arguments import AtLeast, Commands, Formatter, add_factory
from stateful_pipes.cli.profile_run import measure, step_of, table, verdict
from stateful_pipes.testing.pieces import FactoryError, opened

__all__ = ["add"]

_DESCRIPTION = """\
Reads some batches of a pipeline as a training loop would, and tells where the time goes: a table of each node's seconds, in
workers and in the main process, a verdict (does the loop wait for data, for which node, and what to try), and a picture of
who did what when. `factory` is called without arguments and returns a StatefulDataLoader or a torchdata node."""


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    profile = commands.add_parser(
        "profile", help="see where a pipeline's time goes", description=_DESCRIPTION, formatter_class=Formatter
    )
    add_factory(profile)
    profile.add_argument("--batches", type=AtLeast(1), default=100, help="how many to read after the first one")
    profile.add_argument(
        "--seconds-per-step", type=_seconds, default=0.0, help="how long the training step takes that follows each batch"
    )
    profile.add_argument(
        "--busy", action="store_true", help="the step keeps a core busy, as on a CPU; else it waits, as for an accelerator"
    )
    profile.add_argument("--out", type=Path, default=Path("timeline.png"), help="where the picture goes")
    profile.set_defaults(run=_run, parser=profile)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.out.parent.is_dir():
        arguments.parser.error(f"argument --out: there is no folder {str(arguments.out.parent)!r}")
    try:
        loader = opened(arguments.factory)
    except FactoryError as error:
        arguments.parser.error(f"argument module:factory: {error}")
    with loader:
        found = measure(loader, arguments.batches, step_of(arguments.seconds_per_step, arguments.busy))
    if found is None:
        return int(arguments.parser.error("argument module:factory: the pipeline gives no batch"))
    print(table(found))
    print(verdict(found, arguments.seconds_per_step))
    try:
        # Here and not at the top of the file: what draws is an extra.
        from stateful_pipes.cli.profile_timeline import draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("The picture needs matplotlib. Install it with: pip install 'stateful_pipes[profile]'", file=sys.stderr)
        return 2
    draw(found, arguments.out)
    print(f"Who did what when: {arguments.out}")
    return 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value
