"""A secret of a sink is never that of a client: the sink's receiver could decide as the client."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pydantic import ValidationError

from relay.config import Config

SIGNING = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
OTHER = "whsec_AfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
KEY = "bearer-test-key-of-drain"
SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
WEBHOOK = {"kind": "webhook", "name": "hook", "url": "https://x", "secrets": [OTHER]}


@pytest.mark.parametrize(
    ("sink", "client"),
    [
        ({"secrets": [OTHER, SIGNING]}, {"secrets": [SIGNING]}),
        ({"secrets_file": SIGNING}, {"secrets_file": SIGNING}),
        ({"secrets": [SIGNING]}, {"key": SIGNING}),
        ({"bearer": KEY}, {"key": KEY}),
        ({"bearer": KEY}, {"key_sha256": SHA256}),
        ({"bearer_file": KEY}, {"key_file": KEY}),
        ({"bearer": SIGNING}, {"secrets": [SIGNING]}),
        ({"basic": {"user": "u", "password": KEY}}, {"key_sha256": SHA256}),
        ({"headers": {"X-Key": f"Token {KEY}"}}, {"key_sha256": SHA256}),
        ({"headers_file": f"X-Key: {KEY}"}, {"key_sha256": SHA256}),
        ({"url": f"https://x/hook?token={KEY}"}, {"key_sha256": SHA256}),
        ({"kind": "rabbitmq", "url": f"amqp://user:{KEY}@host/"}, {"key_sha256": SHA256}),
    ],
)
def test_a_secret_of_a_sink_and_a_client_is_an_error_that_does_not_show_it(
    tmp_path: Path, sink: dict[str, object], client: dict[str, object]
) -> None:
    def with_files(section: dict[str, object], owner: str) -> dict[str, object]:
        for key, value in section.items():
            if key.endswith("_file"):
                (tmp_path / f"{owner}-{key}").write_text(f"{value}\n")
        return {
            key: str(tmp_path / f"{owner}-{key}") if key.endswith("_file") else value
            for key, value in section.items()
        }

    base = {"kind": "rabbitmq", "name": "hook"} if "kind" in sink else WEBHOOK
    if "secrets_file" in sink:
        base = {key: value for key, value in base.items() if key != "secrets"}
    document = {
        "sinks": [{**base, **with_files(sink, "sink")}],
        "api": {"clients": [{"name": "drain", **with_files(client, "client")}]},
    }
    with pytest.raises(ValidationError, match="client drain and sink hook have the same") as error:
        Config.model_validate(document)
    assert KEY not in str(error.value)
    assert SIGNING not in str(error.value)


def test_two_sinks_may_share_what_no_client_has() -> None:
    """Two channels of a chat have one bot, and two webhooks can have one receiver."""
    second = {**WEBHOOK, "name": "second"}
    clients = [{"name": "drain", "key": KEY, "secrets": [SIGNING]}]
    Config.model_validate({"sinks": [WEBHOOK, second], "api": {"clients": clients}})
