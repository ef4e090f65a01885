"""The YAML document, composed of the sections that the rooms declare; the environment wins over it.

Nothing is started on a wrong one: every error names the file (and line) or the variable, the key path, what was expected
and what came, and never shows a secret.
"""

from __future__ import annotations

import functools
import importlib.resources
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator

from relay import plugins, sinks
from relay.api import ApiSettings
from relay.approvals import ApprovalsSettings
from relay.approvals.principals import declare_chat_principals
from relay.approvals.rules import Quorum, eligible_voters, person_for
from relay.chat import ChatSettings, platforms
from relay.config.document import PREFIX, expand_variables, override, read
from relay.config.problems import ConfigInput, describe_errors
from relay.errors import ConfigError
from relay.events.match import matches_any
from relay.files import may_be_file
from relay.imds import SourceSettings
from relay.outbox import StoreSettings
from relay.settings import Section
from relay.sinks import SinkSettings
from relay.telemetry import TelemetrySettings

OWN = frozenset({"IMDS_RELAY_CONFIG", "IMDS_RELAY_URL", "IMDS_RELAY_KEY"})
"""Variables that the command line has for itself."""
PLACES = (Path("relay.yaml"), Path("/etc/imds-relay/relay.yaml"))
"""Where the document is looked for when none is named."""
DEFAULTS = importlib.resources.files("relay") / "default.yaml"
"""The annotated document that is loaded where there is no other; says of every setting what it is for."""


@functools.cache
def sink_members() -> dict[str, Any]:
    """The members of both families that events are delivered to, sinks and chat sinks, by kind."""
    chats = plugins.members(platforms)
    for chat in chats.values():
        if chat.Settings.principals is not None:
            declare_chat_principals(chat.Settings.principals)
    return {**plugins.members(sinks), **chats}


if TYPE_CHECKING:
    AnySink = SinkSettings
else:
    _settings = [member.Settings for member in sink_members().values()]
    AnySink = (
        Annotated[functools.reduce(operator.or_, _settings), Field(discriminator="kind")]
        if len(_settings) > 1
        else _settings[0]
    )


class Config(Section):
    """The whole document."""

    scope: Literal["auto"] | Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$")] = "auto"
    """The group of VMs that reads this document; auto asks the metadata service. Availability sets are named by hand."""
    relay: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$")] = "auto"
    """This relay's own name; auto is the VM's name."""
    source: SourceSettings = SourceSettings()
    store: StoreSettings = StoreSettings()
    sinks: tuple[AnySink, ...] = ()
    """Any number, told apart by name."""
    approvals: ApprovalsSettings = ApprovalsSettings()
    api: ApiSettings = ApiSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        names = [sink.name for sink in self.sinks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"sinks: expected every name once, {', '.join(repeated)} comes again")
        for sink in self.sinks:
            if (
                isinstance(sink, ChatSettings)
                and sink.needs_public_url
                and self.api.public_url is None
            ):
                raise ValueError(
                    f"api.public_url: expected the URL at which the platform of sink {sink.name} reaches this relay, got none; "
                    "its approve_in_chat needs it"
                )
        if self.approvals.amqp is not None and not any(_answers(sink) for sink in self.sinks):
            raise ValueError(
                "approvals.amqp: expected a rabbitmq sink whose events include approval.*, through which the answers go"
            )
        return self

    @model_validator(mode="after")
    def _clients_can_meet_the_rules(self) -> Config:
        for rule in self.approvals.rules:
            if isinstance(rule.approve, Quorum):
                self._can_be_met(rule.name, rule.approve)
        return self

    def _can_be_met(self, name: str, approve: Quorum) -> None:
        people = self.approvals.people
        named = eligible_voters(approve, self.approvals.groups, people)
        may = {
            principal
            for client in self.api.clients
            if "approve" in client.can
            for principal in client.principals
        }
        able = {
            one
            for one in named
            if one in may
            or not one.startswith(
                ("client:", "mtls:", "entra:") if self.api.oidc is None else ("client:", "mtls:")
            )
        }
        if len({person_for(one, people) for one in able}) < approve.votes:
            there = ", ".join(sorted(able)) or "none"
            raise ValueError(
                f"approvals.rules.{name}.approve: expected {approve.votes} who may vote, there are only: {there}. "
                "A client: or mtls: must be one of api.clients, with approve in its can; an entra: needs api.oidc"
            )
        for client in self.api.clients:
            if (
                approve.votes > 1
                and named.issuperset(client.principals)
                and len({person_for(one, people) for one in client.principals}) > 1
            ):
                both = " and ".join(client.principals)
                raise ValueError(
                    f"approvals.rules.{name}.approve: {both} are one client with two votes: name them as one of approvals.people"
                )

    @property
    def user_events_wait(self) -> bool:
        """Whether no rule can match what users start: Azure then waits up to 15 minutes with each."""
        sources = (rule.match.event_source for rule in self.approvals.rules)
        return not any(
            source is None or "user" in {one.lower() for one in source} for source in sources
        )

    @property
    def answers_on(self) -> str:
        """The exchange on which approvals over AMQP are answered, and after which their queues are named."""
        return next(str(getattr(sink, "exchange", "")) for sink in self.sinks if _answers(sink))


USER_EVENTS_WAIT = (
    "no rule of approvals.rules can match event_source: [User]. Polling makes Azure wait up to 15 minutes for approval of each reboot that "
    "a user starts. Remedy: the rule that `imds-relay init` writes"
)


def _answers(sink: SinkSettings) -> bool:
    answers = ("approval.recorded", "approval.granted", "approval.refused", "approval.voided")
    return sink.kind == "rabbitmq" and all(matches_any(sink.events, name) for name in answers)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that holds, and the file it came from (None: defaults and environment alone)."""

    config: Config
    file: Path | None


def load(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> Loaded:
    """Find, read and check the document. Raises ConfigError with everything that is wrong, a line each."""
    named = path or (
        Path(environment["IMDS_RELAY_CONFIG"]) if environment.get("IMDS_RELAY_CONFIG") else None
    )
    file = named or next((place for place in PLACES if may_be_file(place)), None)
    document = read(file or DEFAULTS)
    values = expand_variables(file, document, environment)
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in OWN
    }
    override(values, variables)
    try:
        return Loaded(Config.model_validate(values), file)
    except ValidationError as error:
        given = ConfigInput(
            file,
            document if file is not None else None,
            values,
            variables,
            _secret_names(),
            sink_members(),
        )
        raise ConfigError("\n".join(describe_errors(error, given))) from None


@functools.cache
def _secret_names() -> frozenset[str]:
    """The names of all fields that hold secrets, in every section; the key itself is often put where its digest belongs."""
    found = {"key_sha256"}
    seen: set[type[BaseModel]] = set()

    def visit(model: type[BaseModel]) -> None:
        if model in seen:
            return
        seen.add(model)
        for name, field in model.model_fields.items():
            if SecretStr in _types_in(field.annotation):
                found.add(name)
            for inner in _types_in(field.annotation):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    visit(inner)

    visit(Config)
    return frozenset(found)


def _types_in(annotation: Any) -> set[Any]:
    arguments = getattr(annotation, "__args__", ())
    return {annotation, *(inner for argument in arguments for inner in _types_in(argument))}
