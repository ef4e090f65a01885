"""Which pattern is certainly inside another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.events.match import is_pattern_inside, matches_any_pattern

_PATTERNS = st.text("ab*?[!]-", max_size=7)
_NAMES = st.text("ab-[]!", max_size=6)


@pytest.mark.parametrize(
    ("pattern", "cover"),
    [
        ("db-1", "db-*"),
        ("DB-1", "db-*"),
        ("db-*", "DB-*"),
        ("db-1*", "db-*"),
        ("db-?", "db-*"),
        ("db-[12]", "db-?"),
        ("db-[12]", "db-[12]"),
        ("db-1", "db-[12]"),
        ("a*b*c", "a*c"),
        ("*", "**"),
        ("**", "*"),
    ],
)
def test_a_pattern_inside_another(pattern: str, cover: str) -> None:
    assert is_pattern_inside(pattern, cover)


@pytest.mark.parametrize(
    ("pattern", "cover"),
    [
        ("*", "db-*"),
        ("d*", "db-*"),
        ("db-*", "db-?"),
        ("db-?", "db-1"),
        ("*-1", "db-*"),
        ("db-[123]", "db-[12]"),
        ("[]", "?"),
        ("*", "?*"),
        ("web-1", "db-*"),
    ],
)
def test_a_pattern_that_can_match_more_is_not_inside(pattern: str, cover: str) -> None:
    assert not is_pattern_inside(pattern, cover)


@given(pattern=_PATTERNS, cover=_PATTERNS, name=_NAMES)
def test_what_a_pattern_inside_another_matches_the_other_matches(
    pattern: str, cover: str, name: str
) -> None:
    if matches_any_pattern([pattern], name) and is_pattern_inside(pattern, cover):
        assert matches_any_pattern([cover], name)
