"""States that are logged when they change."""

from __future__ import annotations

import logging

import pytest

from relay.log_once import LogOnce


def test_a_message_is_logged_when_it_differs_from_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = LogOnce(logging.getLogger("test"))
    log.log_if_changed(logging.INFO, "%s is up", "a")
    log.log_if_changed(logging.INFO, "%s is up", "a")
    log.log_if_changed(logging.INFO, "%s is up", "b")
    log.log_if_changed(logging.WARNING, "%s is up", "b")
    log.log_if_changed(logging.INFO, "%s is up", "a")
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [
        ("INFO", "a is up"),
        ("INFO", "b is up"),
        ("WARNING", "b is up"),
        ("INFO", "a is up"),
    ]
    assert {record.funcName for record in caplog.records} == {
        "test_a_message_is_logged_when_it_differs_from_the_last_one"
    }, "the line of the log names its caller"
