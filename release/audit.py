"""Looks up known vulnerabilities of the locked packages with pip-audit.

`make audit` runs it. Exit codes: 0, none is known; 1, one is known; 2, no index of advisories could
be asked about every package. pip-audit itself calls that success.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release.dist import ROOT
from release.lock import normalize, read_lock

LOCKS = ("run", "build")
"""What is installed on a machine, and what builds it."""
SERVICES = ("pypi", "osv")
"""The indexes of advisories that pip-audit knows, in the order in which they are asked."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What an index of advisories said about a lock."""

    vulnerabilities: tuple[str, ...]
    """A line for each."""
    unknown: tuple[str, ...]
    """Packages about which it said nothing, each with the reason."""


def read_report(report: Mapping[str, Any], lock: str) -> Audit:
    """Return what a report of pip-audit in JSON says about each package of a lock."""
    vulnerabilities, unknown, known = [], [], set()
    for package in report.get("dependencies", ()):
        name = normalize(package["name"])
        if "skip_reason" in package:
            unknown.append(f"{name}: {package['skip_reason']}")
            known.add(name)
            continue
        known.add(name)
        for found in package["vulns"]:
            fixed = ", ".join(found.get("fix_versions") or ()) or "no version"
            vulnerabilities.append(f"{name} {package['version']}: {found['id']}, fixed in {fixed}")
    unknown += [f"{name}: not in the report" for name, _ in read_lock(lock) if name not in known]
    return Audit(tuple(vulnerabilities), tuple(unknown))


def audit(lock: Path, service: str) -> Audit:
    """Ask one index about a lock. Whatever goes wrong makes every package unknown."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--disable-pip"]
    options = ["--require-hashes", "--format", "json", "--timeout", "15"]
    done = subprocess.run(
        [*command, *options, "--vulnerability-service", service, "--progress-spinner", "off"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        names = [name for name, _ in read_lock(lock.read_text())]
        return Audit((), tuple(f"{name}: {last[0][:200]}" for name in names))
    return read_report(report, lock.read_text())


def main() -> int:
    """Audit each lock, and say what is known."""
    code = 0
    for name in LOCKS:
        lock = ROOT / f"requirements/{name}.lock"
        count = len(read_lock(lock.read_text()))
        result, service = Audit((), ()), ""
        for service in SERVICES:
            result = audit(lock, service)
            if result.vulnerabilities or not result.unknown:
                break
        for line in result.vulnerabilities:
            print(f"{name}.lock: {line}")
        if result.vulnerabilities:
            code = 1
        elif result.unknown:
            print(
                f"{name}.lock: not audited: no index of advisories ({', '.join(SERVICES)}) "
                f"answered for {len(result.unknown)} of {count} packages, such as "
                f"{result.unknown[0]}",
                file=sys.stderr,
            )
            code = max(code, 2) if code != 1 else 1
        else:
            print(f"{name}.lock: {count} packages, no known vulnerability ({service})")
    return code


if __name__ == "__main__":
    sys.exit(main())
