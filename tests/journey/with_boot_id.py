"""Runs a relay that reads the boot ID of its machine from a file.

Usage: `python -m tests.journey.with_boot_id FILE python -m relay run …`. A test cannot change the
boot ID of the kernel without a reboot.
"""

from __future__ import annotations

import sys
from pathlib import Path

from relay.cli import main
from relay.imds import instance_metadata

if __name__ == "__main__":
    instance_metadata.BOOT_ID_FILE = Path(sys.argv[1])
    sys.argv = ["imds-relay", *sys.argv[5:]]
    main()
