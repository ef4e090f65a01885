"""``python -m relay`` is ``imds-relay``."""

from __future__ import annotations

from relay.cli import main

main()
