"""The entry point of ``imds-relay`` and ``python -m relay``."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        # Importing takes a second. Ctrl-C during it must not show a traceback.
        from relay.cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(1)
    run()


if __name__ == "__main__":
    main()
