"""``keys``: makes a bearer key and a signing secret, and the configuration lines for them."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from typing import Annotated

import typer

from relay.api.settings import CLIENT_NAME_PATTERN, KEY_PREFIX
from relay.cli._options import AsJson
from relay.cli._output import print_json, print_output
from relay.signature import PREFIX

_KEY_BYTES = 32


def keys(
    *,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The client's name in the printed lines.")
    ] = "new-client",
    as_json: AsJson = False,
) -> None:
    """Make a bearer key and a signing secret for a client, or for a webhook sink.

    They are printed and stored nowhere.
    """
    if re.search(CLIENT_NAME_PATTERN, name) is None:
        raise typer.BadParameter(
            f"expected text that matches {CLIENT_NAME_PATTERN}, got {name!r}", param_hint="--name"
        )
    key = new_bearer_key()
    digest = hashlib.sha256(key.encode()).hexdigest()
    secret = new_signing_secret()
    if as_json:
        print_json({"key": key, "key_sha256": digest, "secret": secret})
        return
    print_output(
        f"# For the client: the bearer key for Authorization, the secret to sign callbacks with.\n"
        f"#   key:    {key}\n"
        f"#   secret: {secret}\n"
        f"# For relay.yaml. The secret of a webhook sink goes into the sink's secrets instead,\n"
        f"# and to the receiver.\n"
        f"api:\n"
        f"  clients:\n"
        f"    - name: {name}\n"
        f"      key_sha256: {digest}\n"
        f"      secrets: [{secret}]\n"
        f"      can: [read, approve, hold]"
    )


def new_bearer_key() -> str:
    """Return a random bearer key for the HTTP API."""
    return f"{KEY_PREFIX}{secrets.token_urlsafe(_KEY_BYTES)}"


def new_signing_secret() -> str:
    """Return a random secret in the form of Standard Webhooks."""
    return PREFIX + base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
