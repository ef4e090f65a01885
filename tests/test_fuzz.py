"""The kept corpus of the fuzzer, and random bytes: no parser breaks, and what it says is true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.targets import TARGETS, kept_inputs


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_handled(name: str) -> None:
    inputs = kept_inputs(name)
    assert inputs
    for data in inputs:
        TARGETS[name](data)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "yaml"])  # it reads a file
@given(data=st.data())
def test_any_bytes_are_handled(name: str, data: st.DataObject) -> None:
    """Some are a kept input with other bytes in the middle."""
    new = data.draw(st.binary(max_size=300))
    TARGETS[name](new)
    kept = data.draw(st.sampled_from(kept_inputs(name)))
    at = data.draw(st.integers(0, len(kept)))
    TARGETS[name](kept[:at] + new[:3] + kept[at + len(new[:3]) :])
