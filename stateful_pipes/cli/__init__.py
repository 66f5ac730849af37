"""The command line: `stateful-pipes`, or `python -m stateful_pipes`."""
