"""``init``, ``keys`` and ``schema`` print what a person or program starts from."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from relay.api.settings import KEY_PREFIX, SERVICE_SOCKET
from relay.chat.platforms.slack.manifest import manifest
from relay.cli._exit_codes import CommandFailed
from relay.cli._options import AsJson, argument, option
from relay.cli._output import print_json, print_lines
from relay.cli._tables import print_table
from relay.config import AGENT_EXAMPLE, DEFAULTS
from relay.config.location import SERVICE_STORE, SYSTEM_FILE
from relay.errors import ConfigError
from relay.events.catalog import CATALOG, EventDefinition, cloudevent_schema
from relay.files import describe_os_error
from relay.settings import Name
from relay.signature import PREFIX
from relay.suggestions import closest
from relay.validation import first_error_path_and_message

SERVICE_GROUP = "imds-relay"
"""The group of the service, as its unit file and the file for systemd-sysusers name it."""
ForAgent = Annotated[bool, option("--agent", None, "For an agent of a fleet: short.")]
ForSystem = Annotated[
    bool,
    option("--system", None, f"Write {SYSTEM_FILE} for the service, instead of printing; as root."),
]

_EMPTY_RULES = re.compile(r"^  rules: \[\](?P<comment> +#.*)\n", re.MULTILINE)
_RULE_FOR_USER_EVENTS = """\
    # Polling makes Azure wait up to 15 minutes for approval of each reboot that a user starts.
    # This rule approves them at once.
    - name: user-initiated
      match: {event_source: [User]}
      approve: automatic
"""


def init(*, agent: ForAgent = False, system: ForSystem = False) -> None:
    """Print a configuration to start from, for relay.yaml.

    It holds every setting with its default and its purpose, examples, and the rule for reboots
    that users start. With --agent it holds what the agent of a fleet needs.

    With --system, the file also names the state file and the local socket of the service, and
    root and the group imds-relay can read it. An existing file is left as it is.
    """
    text = agent_configuration() if agent else initial_configuration()
    if not system:
        print(text, end="")  # noqa: T201  # the output of the command
        return
    _write_system_file(set_service_paths(text), _service_group())
    print_lines(f"{SYSTEM_FILE} is written. Edit it, then see `imds-relay check`")


def set_service_paths(text: str) -> str:
    """Return a configuration with the state file and the socket of the service."""
    text = re.sub(r"^(  path:) relay\.db ", rf"\1 {SERVICE_STORE} ", text, flags=re.MULTILINE)
    return re.sub(r"^(  socket:) auto ", rf"\1 {SERVICE_SOCKET} ", text, flags=re.MULTILINE)


def _service_group() -> int:
    """Return the number of the group of the service."""
    try:
        import grp  # noqa: PLC0415  # only on POSIX
    except ImportError:
        raise ConfigError("--system: expected a system with systemd") from None
    if os.geteuid() != 0:
        raise ConfigError(f"--system: expected root, who may write {SYSTEM_FILE}: use sudo")
    try:
        return grp.getgrnam(SERVICE_GROUP).gr_gid
    except KeyError:
        raise CommandFailed(
            f"there is no group {SERVICE_GROUP} yet: install deploy/systemd/imds-relay.sysusers as "
            "/etc/sysusers.d/imds-relay.conf, and run systemd-sysusers"
        ) from None


def _write_system_file(text: str, group: int) -> None:
    """Write a file that only root can write and a group can read. Raises CommandFailed."""
    file, new = SYSTEM_FILE, SYSTEM_FILE.with_name(f"{SYSTEM_FILE.name}.new")
    try:
        with contextlib.suppress(FileExistsError):
            file.parent.mkdir(mode=0o700)
            os.chown(file.parent, -1, group)
            file.parent.chmod(0o750)
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
            os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, 0o640)
        try:
            os.link(new, file)  # unlike a rename, it replaces nothing
        finally:
            new.unlink()
    except FileExistsError:
        raise CommandFailed(f"{file} exists, and is left as it is") from None
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {describe_os_error(error)}") from error


def initial_configuration() -> str:
    """Return the annotated defaults with the rule for events that users start."""
    defaults = DEFAULTS.read_text(encoding="utf-8")
    text, count = _EMPTY_RULES.subn(
        lambda match: f"  rules:   {match['comment']}\n{_RULE_FOR_USER_EVENTS}", defaults
    )
    assert count == 1  # noqa: S101  # the packaged file has this line; a test checks it
    return text


def agent_configuration() -> str:
    """Return the annotated configuration of an agent."""
    return AGENT_EXAMPLE.read_text(encoding="utf-8")


_KEY_BYTES = 32


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
    """Return a random bearer key for the HTTP API."""
    return f"{KEY_PREFIX}{secrets.token_urlsafe(_KEY_BYTES)}"


def new_signing_secret() -> str:
    """Return a random secret in the form of Standard Webhooks."""
    return PREFIX + base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()


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
    as_json: Annotated[
        bool, option("--json", None, "With --list: print JSON for programs.")
    ] = False,
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
        print_json(cloudevent_schema(_definition_of(name)))


def _definition_of(name: str) -> EventDefinition:
    for definition in CATALOG:
        if name in (definition.name, definition.type):
            return definition
    close = closest(name, ["slack-manifest", *(each.name for each in CATALOG)])
    raise ConfigError(
        f"expected slack-manifest or a type of `imds-relay schema --list`, got {name!r}"
        f"{f'; did you mean {close}?' if close else ''}"
    )
