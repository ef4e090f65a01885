"""Reads a lock: the version and the hashes of each package."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def read_lock(text: str) -> Mapping[tuple[str, str], frozenset[str]]:
    """Return the SHA-256 of the files of each package, by name and version."""
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        match = _ENTRY.match(entry)
        if match is None:
            raise ValueError(f"expected name==version, got {entry[:80]!r}")
        found[normalize(match[1]), match[2]] = frozenset(_HASH.findall(entry))
    return found


def normalize(name: str) -> str:
    """Return the name by which packages are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
