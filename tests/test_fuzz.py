"""The kept corpus of the fuzzer, and random bytes: no parser breaks, and what it says is true."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.mutate_json import mutate_json
from fuzz.targets import TARGETS

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "fuzz/corpus"


def corpus(name: str) -> dict[str, bytes]:
    """Return the kept inputs of a target, by file name."""
    return {file.name: file.read_bytes() for file in sorted((CORPUS / name).iterdir())}


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_handled(name: str) -> None:
    inputs = corpus(name)
    assert inputs
    for data in inputs.values():
        TARGETS[name](data)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "yaml"])  # it reads a file
@given(data=st.binary(max_size=300), seed=st.integers(0, 2**32))
def test_any_bytes_are_handled(name: str, data: bytes, seed: int) -> None:
    """Some are made of a kept input, as the fuzzer makes them."""
    TARGETS[name](data)
    chance = random.Random(seed)  # noqa: S311  # it can be repeated
    kept = chance.choice([*corpus(name).values()])
    TARGETS[name](mutate_json(kept, chance) or kept[: chance.randrange(len(kept) + 1)] + data[:3])


def test_every_folder_of_the_corpus_is_that_of_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == TARGETS.keys()
    assert sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()) < 400_000


@given(st.integers(0, 2**64))
def test_changed_json_is_json_and_seldom_the_same(seed: int) -> None:
    before = {"a": [1, {"b": "text"}], "c": None}
    chance = random.Random(seed)  # noqa: S311  # it can be repeated
    changed = {mutate_json(json.dumps(before).encode(), chance) for _ in range(30)}
    assert len(changed) > 10
    for text in changed:
        assert text is not None
        json.loads(text.decode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_not_changed_as_json(data: bytes) -> None:
    assert mutate_json(data, random.Random(0)) is None  # noqa: S311  # it can be repeated


def test_an_unknown_target_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "expected targets of document" in done.stderr
