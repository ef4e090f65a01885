"""Approvals over RabbitMQ in the configuration: a sink must publish the answers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from relay.config import Config
from tests.journey.relay_process import webhook

AMQP = {"url": "amqp://h/"}


def sink(name: str = "bus", **fields: Any) -> dict[str, Any]:
    return {"kind": "rabbitmq", "name": name, "url": "amqp://h/", **fields}


@pytest.mark.parametrize(
    "sinks",
    [
        [],
        [webhook("https://drain.example.com/")],
        [sink(events=["event.*"])],
        [sink(events=["approval.recorded", "approval.granted", "startrequest.*"])],
        [
            sink("a", events=["approval.recorded"]),
            sink("b", events=["approval.granted", "approval.refused", "approval.voided"]),
        ],
    ],
    ids=["none", "a webhook", "events alone", "some answers", "half of them each"],
)
def test_approvals_whose_answers_would_go_nowhere_are_an_error(sinks: list[dict[str, Any]]) -> None:
    with pytest.raises(
        ValidationError,
        match=r"approvals\.amqp: expected a rabbitmq sink whose events include approval",
    ):
        Config.model_validate({"sinks": sinks, "approvals": {"amqp": AMQP}})
    assert Config.model_validate({"sinks": sinks}).approvals.amqp is None


@pytest.mark.parametrize(
    "events",
    [
        ["*"],
        ["approval.*"],
        ["event.*", "approval.*"],
        [f"approval.{change}" for change in ("recorded", "granted", "refused", "voided")],
    ],
)
def test_queues_are_named_after_the_exchange_that_the_answers_go_to(events: list[str]) -> None:
    sinks = [
        sink("first", exchange="elsewhere", events=["event.*"]),
        sink("second", exchange="answers", events=events),
    ]
    config = Config.model_validate({"sinks": sinks, "approvals": {"amqp": AMQP}})
    assert config.approval_answers_exchange == "answers"
