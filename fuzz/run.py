#!/usr/bin/env python
"""Fuzzes the target that ``FUZZ_TARGET`` names, with the options of libFuzzer.

It needs atheris. To merge, libFuzzer starts this file as a program. `fuzz.__main__` sets the
environment for that.
"""

from __future__ import annotations

import os
import random
import sys

import atheris

with atheris.instrument_imports(include=["relay", "email", "ruamel"]):
    from fuzz.targets import TARGETS

from fuzz.mutate_json import mutate_json


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change JSON as JSON every other time, and all else as bytes."""
    changed = mutate_json(data, random.Random(seed)) if seed % 2 else None
    if changed is None or len(changed) > max_size:
        mutated: bytes = atheris.Mutate(data, max_size)
        return mutated
    return changed


def main() -> None:
    """Run until libFuzzer stops, or the target raises."""
    atheris.Setup(sys.argv, TARGETS[os.environ["FUZZ_TARGET"]], custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
