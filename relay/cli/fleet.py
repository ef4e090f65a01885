"""``fleet``: shows the agents of a hub, and prints what a RabbitMQ must hold for them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from yarl import URL

from relay.cli._options import (
    AsJson,
    ConfigFile,
    DefaultGroup,
    Scope,
    option,
    read_named_file,
    scope_query,
)
from relay.cli._output import format_local_time, pluralize, print_json, print_lines, print_to_stderr
from relay.cli._tables import print_table
from relay.cli.client import RelayCall, RelayCommand
from relay.config import Config, load
from relay.errors import ConfigError
from relay.fleet.rabbitmq_definitions import (
    SALT_BYTES,
    Use,
    fleet_definitions,
    hash_password,
    is_password_hash,
    use_for_approvals,
    use_for_sink,
)
from relay.fleet.settings import HubSettings
from relay.sinks.rabbitmq import Settings as RabbitMQSettings

fleet = typer.Typer(
    cls=DefaultGroup,
    help="Show the agents of a hub, and what their RabbitMQ needs. Without a verb: agents.",
)


@fleet.command("agents", cls=RelayCommand)
async def agents(call: RelayCall, *, scope: Scope = None) -> None:
    """Show the agents of a hub: who they are, when they were heard, and who is silent."""
    answer = call.for_people(await call.relay.get("fleet", **scope_query(scope)))
    columns = ("scope", "agent", "state", "heard", "version", "zone", "clock", "polled")
    rows = []
    for agent in answer["agents"]:
        offset, poll_age = agent["clockOffsetSeconds"], agent["pollAgeSeconds"]
        clock = None if offset is None else f"{offset:+.1f} s"
        polled = None if poll_age is None else f"{poll_age:.0f} s before"
        heard = format_local_time(agent["lastHeard"])
        who = (agent["scope"], agent["name"], agent["state"])
        rows.append((*who, heard, agent["version"], agent["zone"], clock, polled))
    print_table(columns, rows, empty="no agent has been heard of")
    for name in answer["silentScopes"]:
        print_lines(f"no agent of scope {name} is heard of: none of its events starts or ends")
    if rows:
        scopes = {agent["scope"] for agent in answer["agents"]}
        print_lines(f"{pluralize(len(rows), 'agent')} in {pluralize(len(scopes), 'scope')}")


@fleet.command()
def definitions(
    *,
    config: ConfigFile = None,
    hub_user: Annotated[
        str | None, option("--hub-user", "USER", "The hub's user. Default: the user in fleet.url.")
    ] = None,
    password_hash: Annotated[
        list[str] | None,
        option(
            "--password-hash",
            "USER=HASH",
            "Also make this user; a hash as in exported definitions. Repeatable.",
        ),
    ] = None,
    password_file: Annotated[
        list[str] | None,
        option(
            "--password-file",
            "USER=FILE",
            "Also make this user with the password in the file. Repeatable.",
        ),
    ] = None,
    as_json: AsJson = True,  # noqa: ARG001  # there is no other form
) -> None:
    """Print JSON for `rabbitmqctl import_definitions`: users' rights, exchanges and queues.

    It is what a fleet needs on its RabbitMQ. It comes from the configuration of the hub, and calls
    nothing. The import replaces the rights that these users have in the virtual host. Users that
    are not made must exist before.
    """
    loaded = load(config).config
    settings = loaded.fleet
    if not isinstance(settings, HubSettings):
        raise ConfigError("expected the configuration of a hub, one with fleet.role: hub")
    url = settings.broker_urls()[0]
    user = hub_user or url.user
    if user is None:
        raise ConfigError("expected --hub-user, because fleet.url names no user")
    agents_of_fleet = {domain.user for domain in settings.domains}
    if user in agents_of_fleet:
        raise ConfigError(f"--hub-user: expected a user of no domain, got {user!r}")
    hashes = _password_hashes(password_hash or (), password_file or ())
    unknown = sorted(hashes.keys() - {user, *agents_of_fleet})
    if unknown:
        raise ConfigError(
            f"expected passwords of users of this fleet, {', '.join(unknown)} is none"
        )
    others = list(_other_uses(loaded, url))
    print_json(fleet_definitions(settings, user, _vhost_name(url), hashes, others))
    for warning in settings.overlap_warnings():
        print_to_stderr(f"warning: {warning}")
    if settings.declare is True:
        print_to_stderr(
            "the hub may make exchanges and queues, because fleet.declare is true: "
            "after the import it needs only declare: passive, and fewer rights"
        )


def _other_uses(config: Config, url: URL) -> Iterator[Use]:
    """Yield what else the hub's user does in the virtual host of the fleet.

    A user has its rights in one place, so the import must not take these away.
    """
    for sink in config.sinks:
        if isinstance(sink, RabbitMQSettings) and _is_same_account(sink.broker_urls()[0], url):
            yield use_for_sink(sink.exchange, sink.declare)
    amqp = config.approvals.amqp
    if amqp is not None and _is_same_account(amqp.broker_urls()[0], url):
        yield use_for_approvals(config.approval_answers_exchange, amqp.declare)


def _is_same_account(one: URL, other: URL) -> bool:
    return (one.host, one.user, _vhost_name(one)) == (other.host, other.user, _vhost_name(other))


def _vhost_name(url: URL) -> str:
    return url.path[1:] or "/"


def _password_hashes(hashes: Sequence[str], files: Sequence[str]) -> dict[str, str]:
    """Return the hash of the password of each user that the two options name.

    Raises ConfigError for an option or file that cannot be used, and for two passwords of a user.
    """
    found: dict[str, str] = {}
    options = [("--password-hash", given) for given in hashes]
    options += [("--password-file", given) for given in files]
    for name, given in options:
        user, _, value = given.partition("=")
        if not (user and value):
            raise ConfigError(f"{name}: expected USER and a value with = between them")
        if user in found:
            raise ConfigError(f"expected one password for {user}, got two")
        if name == "--password-file":
            password = read_named_file(name, Path(value)).strip()
            if not password:
                raise ConfigError(f"--password-file: {value}: expected a password, it is empty")
            value = hash_password(password, secrets.token_bytes(SALT_BYTES))
        elif not is_password_hash(value):
            raise ConfigError(
                f"--password-hash: expected a hash that RabbitMQ made for {user}, got another text"
            )
        found[user] = value
    return found
