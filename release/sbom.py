"""Writes the bill of materials (SBOM, CycloneDX 1.6) of the locked packages into ``dist/``.

`make sbom` runs it. cyclonedx-py reads the lock. Then everything in the lock must be in the result
with its version and its hashes, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from release.dist import ROOT, version_of
from release.lock import normalize, read_lock

LOCK = ROOT / "requirements/run.lock"


class SbomError(Exception):
    """The bill of materials is not that of the lock. The text says why."""


def check_sbom(sbom: Mapping[str, Any], lock: str) -> None:
    """Raise SbomError unless the components are the packages of the lock, hashes included."""
    components = {
        (normalize(component["name"]), component["version"]): frozenset(
            digest["content"]
            for reference in component.get("externalReferences", ())
            for digest in reference.get("hashes", ())
        )
        for component in sbom.get("components", ())
    }
    expected = read_lock(lock)
    if components != expected:
        differing = sorted(
            f"{name} {version}"
            for name, version in components.keys() | expected.keys()
            if components.get((name, version)) != expected.get((name, version))
        )
        raise SbomError(f"expected the packages of the lock, these differ: {', '.join(differing)}")


def write_sbom(target: Path) -> None:
    """Write the bill of materials. Raises SbomError, and leaves no file then."""
    program = Path(sys.executable).parent / "cyclonedx-py"
    arguments = ["requirements", str(LOCK), "--pyproject", str(ROOT / "pyproject.toml")]
    options = ["--output-reproducible", "--sv", "1.6", "--of", "JSON", "-o", str(target)]
    # The lock does not say what depends on what, and cyclonedx-py warns of it.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [program, *arguments, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SbomError(f"cyclonedx-py failed: {done.stderr.strip()}")
    try:
        check_sbom(json.loads(target.read_text()), LOCK.read_text())
    except SbomError:
        target.unlink()
        raise


def main() -> int:
    """Write it, and say where it is."""
    target = ROOT / "dist" / f"imds_relay-{version_of(ROOT)}.cdx.json"
    target.parent.mkdir(exist_ok=True)
    try:
        write_sbom(target)
    except (SbomError, OSError) as error:
        print(f"make: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {len(read_lock(LOCK.read_text()))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
