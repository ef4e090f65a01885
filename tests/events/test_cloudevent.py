"""The one form in which everything is written, read by the public SDK as an oracle."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event
from cloudevents.core.formats.json import JSONFormat
from hypothesis import given
from hypothesis import strategies as st

from docs.generate import examples
from relay.events.build import Origin
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.events.timestamps import parse_timestamp

EXAMPLES = examples()
ORIGIN = Origin("s", "r")
AT = datetime(2022, 4, 11, 22, 11, 58, tzinfo=UTC)


def assert_the_sdk_reads(said: CloudEvent) -> None:
    """Attribute by attribute and field by field, as the SDK sees it."""
    read = JSONFormat().read(None, said.body)
    attributes = read.get_attributes()
    assert attributes["time"] == parse_timestamp(said.attributes["time"])
    assert {name: value for name, value in attributes.items() if name != "time"} == {
        name: value for name, value in said.attributes.items() if name != "time"
    }
    assert read.get_data() == said.data


@pytest.mark.parametrize("said", EXAMPLES, ids=lambda said: said.name)
def test_the_sdk_takes_it_as_a_structured_http_message(said: CloudEvent) -> None:
    message = HTTPMessage(headers={"content-type": CONTENT_TYPE}, body=said.body)
    assert from_structured_event(message, JSONFormat()).get_id() == said.id


@given(
    st.dictionaries(
        st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True).filter(lambda name: name != "data"),
        st.text(),
    ),
    st.dictionaries(st.text(), st.text()),
)
def test_any_attributes_and_data_come_back_from_the_bytes(
    attributes: dict[str, str | None], data: dict[str, str]
) -> None:
    said = CloudEvent.build(attributes, data)
    assert CloudEvent.parse(said.body) == said
