"""The kept corpus of the fuzzer, and random bytes: no parser breaks, and what it says is true."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.mutate_json import mutate_json
from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent.parent / "fuzz/corpus"


def corpus(name: str) -> list[bytes]:
    """Return the kept inputs of a target."""
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_handled(name: str) -> None:
    inputs = corpus(name)
    assert inputs
    for data in inputs:
        TARGETS[name](data)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "yaml"])  # it reads a file
@given(data=st.binary(max_size=300), seed=st.integers(0, 2**32))
def test_any_bytes_are_handled(name: str, data: bytes, seed: int) -> None:
    """Some are made of a kept input, as the fuzzer makes them."""
    TARGETS[name](data)
    chance = random.Random(seed)  # noqa: S311  # it can be repeated
    kept = chance.choice(corpus(name))
    TARGETS[name](mutate_json(kept, chance) or kept[: chance.randrange(len(kept) + 1)] + data[:3])
