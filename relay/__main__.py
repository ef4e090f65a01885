"""Where ``imds-relay`` and ``python -m relay`` begin."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line, and run it."""
    try:
        from relay.cli import main as run  # noqa: PLC0415  # loading takes a second, in which Ctrl-C is no traceback either
    except KeyboardInterrupt:
        sys.exit(1)
    run()


if __name__ == "__main__":
    main()
