"""The command line: `python -m stateful_pipes demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]

_DEMO = """\
Trains a small network on 1,797 handwritten digits twice: once straight through, and once killed with SIGKILL at random
steps and started anew from the last checkpoint on disk. Then compares what the two trainings saw and what came out.
Exit code 0 if all is identical, 1 if anything differs."""
_DEMO_PACKAGES = ("rich", "sklearn", "tqdm")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code; 2 stands for a missing extra, as argparse's for wrong arguments."""
    parser = argparse.ArgumentParser(prog="stateful-pipes", description="Input pipelines for PyTorch that resume bit for bit.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="kill a training at random and see it resume exactly", description=_DEMO, formatter_class=_Formatter
    )
    demo.add_argument("--epochs", type=_AtLeast(1), default=5, help="passes over the digits")
    demo.add_argument("--batch-size", type=_AtLeast(1), default=32, help="digits in a batch")
    demo.add_argument("--workers", type=_AtLeast(0), default=2, help="worker processes that load; 0 loads inline")
    demo.add_argument("--kills", type=_AtLeast(1), default=3, help="how often the second training is killed")
    demo.add_argument("--seed", type=_AtLeast(0, below=2**32), default=0, help="of the training, and of where it is killed")
    # For the tests: it shows that the comparison can fail.
    demo.add_argument("--break-resume", action="store_true", help=argparse.SUPPRESS)
    return _demo(demo, parser.parse_args(argv))


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        # Here and not at the top of the file: what the demo needs is an extra.
        from stateful_pipes.cli.demo import demo
        from stateful_pipes.cli.demo_training import Options, count_steps
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _DEMO_PACKAGES:
            raise
        print(f"The demo needs {missing}. Install what it needs with: pip install 'stateful_pipes[demo]'", file=sys.stderr)
        return 2
    options = Options(arguments.epochs, arguments.batch_size, arguments.workers, arguments.seed, arguments.break_resume)
    steps = count_steps(options)
    if 2 * arguments.kills >= steps:
        parser.error(f"argument --kills: must be less than half of the {steps} steps, got {arguments.kills}")
    try:
        return demo(options, arguments.kills)
    except KeyboardInterrupt:
        return 130  # as a shell says of what Ctrl-C ended


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults and keeps the description's lines."""


class _AtLeast:
    """Reads an integer within bounds."""

    def __init__(self, least: int, *, below: int | None = None) -> None:
        self.least, self.below = least, below

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < self.least or (self.below is not None and value >= self.below):
            bound = f"at least {self.least}" + (f" and below {self.below}" if self.below is not None else "")
            raise argparse.ArgumentTypeError(f"must be {bound}, got {value}")
        return value
