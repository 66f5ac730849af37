"""The command line. Each subcommand is a module that adds itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from stateful_pipes.cli import demo, diff, inspect, profile, verify

__all__ = ["main"]

_COMMANDS = (demo, verify, inspect, diff, profile)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code; 2 stands for a missing extra, as argparse's for wrong arguments."""
    parser = argparse.ArgumentParser(prog="stateful-pipes", description="Input pipelines for PyTorch that resume bit for bit.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130  # as a shell says of what Ctrl-C ended
