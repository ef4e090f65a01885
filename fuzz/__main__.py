"""Fuzzes each target for some minutes, and keeps what covers more: ``python -m fuzz``.

The results are stored for docs/proof.md, which `make docs` writes. Inputs that crash a target are
written to ``fuzz/crashes``. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from fuzz.report import TargetResult, store
from fuzz.targets import TARGETS

FOLDER = Path(__file__).parent
PROGRAM, CORPUS, CRASHES = FOLDER / "run.py", FOLDER / "corpus", FOLDER / "crashes"
MAX_BYTES = 2048
"""The longest input: longer ones find little more, and take long."""
GRACE = 600
"""Seconds after which a fuzzer that does not end by itself is killed."""
MAX_FILES = 100
"""The corpus keeps at most so many files of each target, the smallest first."""


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz one target; return whether it held. What covers more is added to the corpus."""
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    CRASHES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found, merged = Path(folder) / "found", Path(folder) / "merged"
        found.mkdir()
        merged.mkdir()
        done = _run(
            name,
            *(f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048"),
            *(f"-dict={FOLDER / 'words.dict'}", f"-artifact_prefix={CRASHES}/{name}-"),
            *(str(found), str(kept)),
            seconds=seconds + GRACE,
        )
        _run(name, "-merge=1", str(merged), str(kept), str(found), seconds=GRACE)
        _keep(merged, kept)
    lines = re.findall(r"^#(\d+)\s.*?cov: (\d+) ft: (\d+)", done.stderr, re.MULTILINE)
    runs, branches, _ = lines[-1] if lines else ("0", "0", "0")
    files = len(list(kept.iterdir()))
    print(f"{name}: {runs} runs, {branches} branches, {files} files in the corpus", flush=True)
    result = TargetResult(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        minutes=round(seconds / 60, 1),
        runs=int(runs),
        branches=int(branches),
        files=files,
        crashes=len(list(CRASHES.glob(f"{name}-*"))),
    )
    store(name, result)
    if done.returncode != 0:
        print(done.stdout[-3000:], done.stderr[-1500:], sep="\n", flush=True)
    return done.returncode == 0


def _run(name: str, *options: str, seconds: float) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "FUZZ_TARGET": name,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER.parent),
    }
    command = [str(PROGRAM), f"-max_len={MAX_BYTES}", *options]
    try:
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it did not end within {seconds:g} s")


def _keep(merged: Path, kept: Path) -> None:
    """Replace the corpus by the smallest files of the merged one."""
    files = sorted(merged.iterdir(), key=lambda file: (file.stat().st_size, file.name))
    if not files:
        return  # nothing could be merged, for example because an input of the corpus crashes
    shutil.rmtree(kept)
    kept.mkdir()
    for file in files[:MAX_FILES]:
        shutil.copy(file, kept)


def main() -> int:
    """Fuzz the targets that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=10, help="for each target (default: 10)")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"expected targets of {', '.join(TARGETS)}, got {', '.join(sorted(unknown))}")
    names = arguments.targets or list(TARGETS)
    failed = [name for name in names if not fuzz(name, max(1, int(arguments.minutes * 60)))]
    if failed:
        print(f"failed: {', '.join(failed)}; the inputs are in {CRASHES}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
