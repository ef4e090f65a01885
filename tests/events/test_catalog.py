"""Schemas and pages that are made from the catalogue: right, strict, shipped and up to date."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import orjson
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event
from cloudevents.core.formats.json import JSONFormat
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError

from docs import generate
from relay.events.build import CATALOG, EndOutcome, EventDefinition, cloudevent_schema
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.events.model import Document, diff_events_with_document
from relay.events.timestamps import parse_timestamp
from tests.documented import blocks
from tests.events.strategies import DOCUMENTS
from tests.events.test_build import build_event

FORMATS = FormatChecker(())


@FORMATS.checks("date-time", raises=ValueError)
def _is_rfc_3339(text: object) -> bool:
    return (
        isinstance(text, str)
        and text.endswith("Z")
        and datetime.fromisoformat(text).tzinfo is not None
    )


def strict(kind: EventDefinition) -> Draft202012Validator:
    """The shipped schema, but with additional properties forbidden: we write none."""
    closed = copy.deepcopy(cloudevent_schema(kind))
    closed["additionalProperties"] = False
    closed["properties"]["data"]["additionalProperties"] = False
    return Draft202012Validator(closed, format_checker=FORMATS)


STRICT = {kind.name: strict(kind) for kind in CATALOG}
EXAMPLES = {said.name: said for said in generate.examples()}
EACH_TYPE = pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.name)


def written(said: CloudEvent) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(said.body)
    return event


def test_the_examples_of_the_page_are_valid() -> None:
    """The first is whole; the others show the data that differs."""
    whole, *others = [orjson.loads(text) for text in blocks("docs/events.md", "json")]
    STRICT["event.scheduled"].validate(whole)
    for shown in others:
        assert any(shown.items() <= example.data.items() for example in EXAMPLES.values())


@EACH_TYPE
def test_each_example_meets_its_schema_and_no_other(kind: EventDefinition) -> None:
    Draft202012Validator.check_schema(cloudevent_schema(kind))
    event = written(EXAMPLES[kind.name])
    assert [name for name, validator in STRICT.items() if validator.is_valid(event)] == [kind.name]


@EACH_TYPE
def test_a_schema_misses_everything_that_is_left_out(kind: EventDefinition) -> None:
    event = written(EXAMPLES[kind.name])
    optional = {
        "eventtype",
        "eventsource",
        "notbefore",
        "outcome",
        "causationid",
        "subject" if kind.name.startswith("relay.") else "",
    }
    for name in set(event) - optional:
        with pytest.raises(ValidationError):
            STRICT[kind.name].validate({key: value for key, value in event.items() if key != name})
    for name in event["data"]:
        data = {key: value for key, value in event["data"].items() if key != name}
        with pytest.raises(ValidationError):
            STRICT[kind.name].validate(event | {"data": data})


@given(DOCUMENTS, DOCUMENTS)
def test_every_event_meets_its_schema_and_the_sdk_reads_it(old: Document, new: Document) -> None:
    for change in diff_events_with_document(old.events, new):
        ended = EndOutcome("unknown", "none")
        said = build_event(change, incarnation=new.incarnation, approved_by_relay=True, ended=ended)
        STRICT[said.name].validate(written(said))
        assert_the_sdk_reads(said)


# --- what is written from them


def test_every_generated_file_is_up_to_date() -> None:
    """If this fails, run `make docs`."""
    assert generate.stale() == []


def assert_the_sdk_reads(said: CloudEvent) -> None:
    """Attribute by attribute and field by field, as the SDK sees it."""
    read = JSONFormat().read(None, said.body)
    attributes = read.get_attributes()
    assert attributes["time"] == parse_timestamp(said.attributes["time"])
    assert {name: value for name, value in attributes.items() if name != "time"} == {
        name: value for name, value in said.attributes.items() if name != "time"
    }
    assert read.get_data() == said.data


@pytest.mark.parametrize("said", EXAMPLES.values(), ids=lambda said: said.name)
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
