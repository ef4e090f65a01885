"""Run a relay with the boot id that a file holds.

The command is `python -m tests.journey.with_boot_id FILE python -m relay run …`. The kernel's own
boot id cannot change without a reboot.
"""

from __future__ import annotations

import sys
from pathlib import Path

from relay.cli import main
from relay.imds import discovery

if __name__ == "__main__":
    discovery._BOOT_ID = Path(sys.argv[1])  # noqa: SLF001  # the path of the boot id
    sys.argv = ["imds-relay", *sys.argv[5:]]
    main()
