"""A relay on a machine whose boot is named in a file: `python -m tests.journey.with_boot_id FILE python -m relay run …`.

The kernel's own name of the running boot is the one thing that a test cannot change without a reboot.
"""

from __future__ import annotations

import sys
from pathlib import Path

from relay.cli import main
from relay.imds import discovery

if __name__ == "__main__":
    discovery.BOOT_ID_FILE = Path(sys.argv[1])  # where the system names its boot
    sys.argv = ["imds-relay", *sys.argv[5:]]
    main()
