"""`python -m stateful_pipes`."""

from stateful_pipes.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
