"""``keys``: makes a bearer key and a signing secret, and the lines of the configuration that go with them."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from typing import Annotated

import typer

from relay.api.settings import CLIENT_NAME_PATTERN
from relay.cli._output import print_json, print_output
from relay.cli.events import AsJson
from relay.signature import PREFIX

_BYTES = 32


def keys(
    *,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The client's name in the lines to paste.")
    ] = "new-client",
    as_json: AsJson = False,
) -> None:
    """Make a bearer key and a signing secret for a client, or for a webhook sink.

    They are shown here and kept nowhere.
    """
    if re.search(CLIENT_NAME_PATTERN, name) is None:
        raise typer.BadParameter(
            f"expected text that matches {CLIENT_NAME_PATTERN}, got {name!r}", param_hint="--name"
        )
    key = f"imdsr_{secrets.token_urlsafe(_BYTES)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    secret = PREFIX + base64.b64encode(secrets.token_bytes(_BYTES)).decode()
    if as_json:
        print_json({"key": key, "key_sha256": digest, "secret": secret})
        return
    print_output(
        f"# The client keeps these: the bearer key for Authorization, the secret to sign callbacks with.\n"
        f"#   key:    {key}\n"
        f"#   secret: {secret}\n"
        f"# These lines go into relay.yaml. For a webhook sink the secret goes into its secrets, and to the receiver.\n"
        f"api:\n"
        f"  clients:\n"
        f"    - name: {name}\n"
        f"      key_sha256: {digest}\n"
        f"      secrets: [{secret}]\n"
        f"      can: [read, approve, hold]"
    )
