"""``init``, ``keys`` and ``schema`` print what a person or program starts from."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from relay.api.settings import KEY_PREFIX
from relay.chat.platforms.slack import manifest
from relay.cli._options import AsJson, ListAsJson, argument, option
from relay.cli._output import print_json, print_lines
from relay.cli._tables import print_table
from relay.config import AGENT_EXAMPLE, DEFAULTS
from relay.errors import ConfigError
from relay.events.build import CATALOG, cloudevent_schema
from relay.settings import Name, closest, first_error_path_and_message
from relay.signature import PREFIX

ForAgent = Annotated[bool, option("--agent", None, "For an agent of a fleet: short.")]

_RULE_FOR_USER_EVENTS = """\
    # Polling makes Azure wait up to 15 minutes for approval of each reboot that a user starts.
    # This rule approves them at once.
    - name: user-initiated
      match: {event_source: [User]}
      approve: automatic
"""


def init(*, agent: ForAgent = False) -> None:
    """Print a configuration to start from, for relay.yaml.

    It holds every setting with its default and its purpose, examples, and the rule for reboots
    that users start. With --agent it holds what the agent of a fleet needs.
    """
    text = AGENT_EXAMPLE.read_text(encoding="utf-8") if agent else initial_configuration()
    print(text, end="")  # noqa: T201  # the output of the command


def initial_configuration() -> str:
    before, _, after = DEFAULTS.read_text(encoding="utf-8").partition("  rules: []")
    comment, _, after = after.partition("\n")
    return f"{before}  rules:   {comment}\n{_RULE_FOR_USER_EVENTS}{after}"


def keys(
    *,
    name: Annotated[
        str, option("--name", "NAME", "The client's name in the printed lines.")
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
    return f"{KEY_PREFIX}{secrets.token_urlsafe(32)}"


def new_signing_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def schema(
    name: Annotated[
        str | None,
        argument("TYPE", "Such as event.scheduled, or slack-manifest. Default: all types."),
    ] = None,
    *,
    list_types: Annotated[
        bool, option("--list", None, "List the types, and when each is sent.")
    ] = False,
    answers: Annotated[
        str,
        option(
            "--answers",
            "HOW",
            "With slack-manifest: none (the app only posts messages with links), "
            "or socket (Socket Mode).",
        ),
    ] = "socket",
    as_json: ListAsJson = False,
) -> None:
    """Print the JSON Schema of one CloudEvent, or of all by type.

    Also prints a Slack app's manifest.
    """
    if list_types and as_json:
        print_json([{"type": definition.type, "when": definition.when} for definition in CATALOG])
    elif list_types:
        rows = [(definition.type, definition.when) for definition in CATALOG]
        print_table(("type", "when"), rows, empty="")
    elif name is None:
        print_json({definition.type: cloudevent_schema(definition) for definition in CATALOG})
    elif name == "slack-manifest":
        if answers not in ("none", "socket"):
            raise ConfigError(f"--answers: expected none or socket, got {answers!r}")
        print_json(manifest(answers))
    else:
        definition = next((each for each in CATALOG if name in (each.name, each.type)), None)
        if definition is None:
            close = closest(name, ["slack-manifest", *(each.name for each in CATALOG)])
            raise ConfigError(
                f"expected slack-manifest or a type of `imds-relay schema --list`, got {name!r}"
                f"{f'; did you mean {close}?' if close else ''}"
            )
        print_json(cloudevent_schema(definition))
