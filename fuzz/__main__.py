"""Fuzzes each target for some minutes, and keeps what covers more: ``python -m fuzz``.

Inputs that crash a target are written to ``fuzz/crashes``. The exit code is 1 if there are any.
With ``FUZZ_TARGET`` set it is the fuzzer itself, with the options of libFuzzer.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
CRASHES = FOLDER / "crashes"
GRACE = 600
"""Seconds after which a fuzzer that does not end by itself is killed."""
MAX_INPUTS = 100
"""The corpus of a target, the shortest first."""


def be_fuzzer(name: str) -> None:
    """Run until libFuzzer stops, or the target raises."""
    import atheris  # noqa: PLC0415  # what is to be covered is imported after it

    with atheris.instrument_imports(include=["relay", "email", "ruamel"]):
        from fuzz.targets import TARGETS  # noqa: PLC0415  # the same

    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz one target; return whether it held. What covers more is added to the corpus."""
    from fuzz.targets import CORPUS, kept_inputs  # noqa: PLC0415  # the fuzzer instruments it

    CRASHES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        kept, found = Path(folder) / "kept", Path(folder) / "found"
        kept.mkdir()
        found.mkdir()
        for number, data in enumerate(kept_inputs(name)):
            (kept / str(number)).write_bytes(data)
        command = [sys.executable, "-m", "fuzz", "-max_len=2048", f"-max_total_time={seconds}"]
        command += ["-timeout=10", "-rss_limit_mb=2048", f"-dict={FOLDER / 'words.dict'}"]
        command += [f"-artifact_prefix={CRASHES}/{name}-", str(found), str(kept)]
        done = subprocess.run(
            command,
            cwd=FOLDER.parent,
            env=os.environ | {"FUZZ_TARGET": name},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds + GRACE,
        )
        inputs = {file.read_bytes() for file in (*kept.iterdir(), *found.iterdir())}
    shortest = sorted(inputs, key=lambda data: (len(data), data))[:MAX_INPUTS]
    (CORPUS / name).write_text("".join(f"{data!r}\n" for data in shortest), "ascii")
    counts = re.findall(r"^#(\d+)\s.*?cov: (\d+)", done.stderr, re.MULTILINE) or [("0", "0")]
    runs, branches = counts[-1]
    print(f"{name}: {runs} runs, {branches} branches, {len(shortest)} inputs kept", flush=True)
    if done.returncode != 0:
        print(done.stdout[-3000:], done.stderr[-1500:], sep="\n", flush=True)
    return done.returncode == 0


def main() -> int:
    """Fuzz the targets that are named, or all."""
    from fuzz.targets import TARGETS  # noqa: PLC0415  # the fuzzer instruments it

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
    if target := os.environ.get("FUZZ_TARGET"):
        be_fuzzer(target)
    else:
        sys.exit(main())
