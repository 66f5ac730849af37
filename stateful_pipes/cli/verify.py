"""`stateful-pipes verify module:factory`."""

from __future__ import annotations

import argparse
import sys
import traceback

from stateful_pipes.cli.arguments import AtLeast, Commands, Formatter, add_factory
from stateful_pipes.errors import StatefulPipesError
from stateful_pipes.testing.pieces import FactoryError
from stateful_pipes.testing.verification import verify

__all__ = ["add"]

_DESCRIPTION = """\
Reads your own pipeline straight through, and again with random cuts, each resumed from its state in a fresh pipeline, with
other numbers of workers, with workers killed, and in a new process; and compares every batch bit for bit. The factory is a
function that returns a StatefulDataLoader or a torchdata node, a new one at each call. If it has a parameter num_workers, it
is called with that.
Exit code 0 and "exact" if all is identical; 1 if anything differs, with the first batch, sample and leaf that does, and the
likeliest cause, found by experiment; 2 if it cannot be read at all."""


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "verify", help="see whether your own pipeline resumes exactly", description=_DESCRIPTION, formatter_class=Formatter
    )
    add_factory(parser)
    parser.add_argument("--batches", type=AtLeast(1), default=64, help="read at most so many, and at most two epochs")
    parser.add_argument("--cuts", type=AtLeast(0), default=8, help="random cuts in each trial, beside those always made")
    parser.add_argument("--workers", type=_numbers, default="0,2", help="numbers of worker processes, with commas between")
    parser.add_argument("--kills", type=AtLeast(0), default=2, help="workers killed with SIGKILL")
    parser.add_argument("--seed", type=AtLeast(0), default=0, help="of the cuts and kills")
    parser.set_defaults(run=_run, parser=parser)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(AtLeast(0)(one) for one in text.split(","))


def _run(arguments: argparse.Namespace) -> int:
    try:
        verdict = verify(
            arguments.factory,
            batches=arguments.batches,
            seed=arguments.seed,
            cuts=arguments.cuts,
            workers=arguments.workers,
            kills=arguments.kills,
            report=lambda line: print(line, flush=True),
        )
    except StatefulPipesError as error:
        print(f"NOT exact: {error}", file=sys.stderr)
        return 1
    except FactoryError as error:
        arguments.parser.error(f"argument module:factory: {error}")
    except Exception:  # the pipeline's own, by which nothing is known of its resume
        traceback.print_exc()
        return 2
    for note in verdict.notes:
        print(f"not tried: {note}")
    exact = f"exact{', but for what was not tried' if verdict.notes else ''}"
    print(exact if verdict.difference is None else f"NOT exact: {verdict.difference}")
    return 0 if verdict.is_exact else 1
