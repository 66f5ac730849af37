"""`stateful-pipes demo`."""

from __future__ import annotations

import argparse
import sys

from stateful_pipes.cli.arguments import AtLeast, Commands, Formatter

__all__ = ["add"]

_DESCRIPTION = """\
Trains a small network on 1,797 handwritten digits twice: once straight through, and once killed with SIGKILL at random
steps and started anew from the last checkpoint on disk. Then compares what the two trainings saw and what came out.
Exit code 0 if all is identical, 1 if anything differs."""
_PACKAGES = ("rich", "sklearn", "tqdm")


def add(commands: Commands) -> None:
    """Adds the subcommand."""
    demo = commands.add_parser(
        "demo", help="kill a training at random and see it resume exactly", description=_DESCRIPTION, formatter_class=Formatter
    )
    demo.add_argument("--epochs", type=AtLeast(1), default=5, help="passes over the digits")
    demo.add_argument("--batch-size", type=AtLeast(1), default=32, help="digits in a batch")
    demo.add_argument("--workers", type=AtLeast(0), default=2, help="worker processes that load; 0 loads inline")
    demo.add_argument("--kills", type=AtLeast(1), default=3, help="how often the second training is killed")
    demo.add_argument("--seed", type=AtLeast(0, below=2**32), default=0, help="of the training, and of where it is killed")
    # For the tests: it shows that the comparison can fail.
    demo.add_argument("--break-resume", action="store_true", help=argparse.SUPPRESS)
    demo.set_defaults(run=_run, parser=demo)


def _run(arguments: argparse.Namespace) -> int:
    try:
        # Here and not at the top of the file: what the demo needs is an extra.
        from stateful_pipes.cli.demo_run import demo
        from stateful_pipes.cli.demo_training import Options, count_steps
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        print(f"The demo needs {missing}. Install what it needs with: pip install 'stateful_pipes[demo]'", file=sys.stderr)
        return 2
    options = Options(arguments.epochs, arguments.batch_size, arguments.workers, arguments.seed, arguments.break_resume)
    steps = count_steps(options)
    if 2 * arguments.kills >= steps:
        arguments.parser.error(f"argument --kills: must be less than half of the {steps} steps, got {arguments.kills}")
    return demo(options, arguments.kills)
