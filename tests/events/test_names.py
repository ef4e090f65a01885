"""The names of a machine in both notations of scale sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.events.model import add_underscore_prefixed_names, other_instance_names


@pytest.mark.parametrize(
    ("name", "scale_set", "others"),
    [
        ("web_18", None, ["web00000i"]),
        ("web00000i", None, ["web_18"]),
        ("web_18", "Frontends", ["Frontends00000i"]),
        ("web00000i", "frontends", ["frontends_18", "web_18"]),
        ("web_0", None, ["web000000"]),
        ("web_1234567890", None, ["web_1234_312745860"]),  # no machine has that name
        ("db-1", None, []),
        ("", None, []),
    ],
)
def test_a_name_of_a_scale_set_has_another_notation(
    name: str, scale_set: str | None, others: list[str]
) -> None:
    assert list(other_instance_names(name, scale_set)) == others


@given(st.integers(0, 36**5))
def test_the_two_notations_lead_to_each_other(number: int) -> None:
    (computer_name,) = other_instance_names(f"web_{number}")
    assert f"web_{number}" in other_instance_names(computer_name)


def test_old_versions_of_the_api_put_a_prefix_before_a_name() -> None:
    assert add_underscore_prefixed_names(frozenset({"a", "b"})) == {"a", "_a", "b", "_b"}
