"""``init``: prints a configuration file to start from, or writes that of the service."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from relay.api.local_socket import SERVICE_SOCKET
from relay.cli._exit_codes import CommandFailed
from relay.cli._output import print_lines
from relay.config import AGENT_EXAMPLE, DEFAULTS
from relay.config.file_lookup import SERVICE_STORE, SYSTEM_FILE
from relay.errors import ConfigError
from relay.files import describe_os_error

SERVICE_GROUP = "imds-relay"
"""The group of the service, as its unit file and the file for systemd-sysusers name it."""
ForAgent = Annotated[bool, typer.Option("--agent", help="For an agent of a fleet: short.")]
ForSystem = Annotated[
    bool,
    typer.Option(
        "--system", help=f"Write {SYSTEM_FILE} for the service, instead of printing; as root."
    ),
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
    _write_group_readable_file(SYSTEM_FILE, set_service_paths(text), _service_group())
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


def _write_group_readable_file(file: Path, text: str, group: int) -> None:
    """Write a file that only root can write and a group can read. Raises CommandFailed."""
    new = file.with_name(f"{file.name}.new")
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
