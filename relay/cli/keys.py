"""``keys``: makes a bearer key and a signing secret, and the configuration lines for them."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from relay.api.settings import KEY_PREFIX
from relay.cli._options import AsJson
from relay.cli._output import print_json, print_lines
from relay.settings import Name
from relay.signature import PREFIX
from relay.validation import first_error_path_and_message

_KEY_BYTES = 32


def keys(
    *,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The client's name in the printed lines.")
    ] = "new-client",
    as_json: AsJson = False,
) -> None:
    """Make a bearer key and a signing secret for a client, or for a webhook sink.

    They are printed and stored nowhere. What is printed is YAML: all of it is a configuration, and
    the lines for the client are comments in it.
    """
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        _, problem = first_error_path_and_message(error)
        raise typer.BadParameter(f"{problem}, got {name!r}", param_hint="--name") from None
    key = make_random_bearer_key()
    digest = hashlib.sha256(key.encode()).hexdigest()
    secret = new_signing_secret()
    if as_json:
        print_json({"key": key, "key_sha256": digest, "secret": secret})
        return
    print_lines(
        f'# For relay.yaml. If it has api: and clients: already, add the lines from "- name" on\n'
        f"# below its clients:, in place of a [] there.\n"
        f"api:\n"
        f"  clients:\n"
        f'    - name: "{name}"\n'
        f'      key_sha256: "{digest}"\n'
        f'      secrets: ["{secret}"]\n'
        f"      can: [read, approve, hold]\n"
        f"\n"
        f"# For {name} alone: its key for the API, and the secret with which it signs callbacks.\n"
        f"#   key:    {key}\n"
        f"#   secret: {secret}\n"
        f"# With the key in the shell, every verb works at {name}, with --url:\n"
        f"#   export IMDS_RELAY_KEY={key}\n"
        f"# A webhook sink needs the secret only: in the secrets of the sink, and at its receiver."
    )


def make_random_bearer_key() -> str:
    """Return a random bearer key for the HTTP API."""
    return f"{KEY_PREFIX}{secrets.token_urlsafe(_KEY_BYTES)}"


def new_signing_secret() -> str:
    """Return a random secret in the form of Standard Webhooks."""
    return PREFIX + base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
