"""Playbooks: YAML files that say what the simulated Azure does when.

The control API takes the same actions. docs/simulator.md#playbooks lists the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from relay.errors import ConfigError
from relay.settings import Duration, Section, describe_choices, format_path
from relay.simulator.azure import SimulatedAzure
from relay.simulator.event import Event, EventState, Plan
from relay.simulator.scope import InvalidTransition
from relay.simulator.setup import Fault, Setup

_PACKAGED = {
    file.stem: file for file in sorted(Path(__file__).with_name("playbooks").glob("*.yaml"))
}


class EventUpdate(Section):
    """The changes of ``update`` to a live event. A key that is left out changes nothing."""

    event: str
    notice: Duration | None = None
    resources: tuple[str, ...] | None = None
    description: str | None = None
    duration: int | None = None
    fields: dict[str, Any] | None = None


class OtherApproval(Section):
    """An approval by another VM or an operator."""

    event: str
    vm: str


class AwaitedEventState(Section):
    """The state of an event that a step waits for. A later state counts too."""

    event: str
    is_: EventState = Field(alias="is")


class Action(Section):
    """Exactly one action, by its key."""

    schedule: Plan | None = None
    start: str | None = None
    end: str | None = None
    cancel: str | None = None
    update: EventUpdate | None = None
    approve: OtherApproval | None = None
    fault: Fault | None = None
    clear_faults: Literal[True] | None = None
    skip_incarnations: Annotated[int, Field(ge=1)] | None = None
    reset_incarnation: Annotated[int, Field(ge=0)] | None = None
    disable: Literal[True] | None = None
    say: str | None = None

    @model_validator(mode="after")
    def _has_one_key(self) -> Action:
        keys = self.given_keys()
        if len(keys) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(Action.model_fields)}, "
                f"got {' and '.join(keys) or 'none'}"
            )
        return self

    def given_keys(self) -> list[str]:
        return [name for name in Action.model_fields if getattr(self, name) is not None]


class Step(Action):
    """An action and its time. Times are Azure's, and pass ``scale`` times faster."""

    at: Duration | None = None
    after: Duration | None = None
    when: AwaitedEventState | None = None

    @model_validator(mode="after")
    def _check_at_stands_alone(self) -> Step:
        if self.at is not None and (self.after is not None or self.when is not None):
            raise ValueError("expected at alone, or after and when; got at with one of them")
        return self


class Playbook(Section):
    """One case of maintenance, from its start to its end: docs/simulator.md#playbooks."""

    description: str
    source: str = ""
    azure: Setup = Setup()
    loop: bool = False
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_event_references(self) -> Playbook:
        known: set[str | None] = set()
        for number, step in enumerate(self.steps):
            sections = (step.update, step.approve, step.when)
            references = [section.event for section in sections if section is not None]
            references += [name for name in (step.start, step.end, step.cancel) if name is not None]
            for reference in references:
                if reference not in known:
                    raise ValueError(
                        f"steps[{number}]: expected the name or id of an event that "
                        f"an earlier step schedules, got {reference!r}"
                    )
            if step.schedule is not None:
                known |= {step.schedule.name, step.schedule.id}
        return self


ACTIONS = tuple(Action.model_fields)
"""Every action of a step and of ``POST /sim/<action>``."""

_PERFORM: Mapping[str, Callable[[SimulatedAzure, Any], Event | None]] = {
    "schedule": SimulatedAzure.schedule,
    "start": SimulatedAzure.start,
    "end": SimulatedAzure.end,
    "cancel": SimulatedAzure.cancel,
    "update": lambda azure, update: azure.update_event(**dict(update)),
    "approve": lambda azure, approval: azure.approve(approval.event, approval.vm),
    "fault": SimulatedAzure.add_fault,
    "clear_faults": lambda azure, _: azure.clear_faults(),
    "skip_incarnations": SimulatedAzure.skip_incarnations,
    "reset_incarnation": SimulatedAzure.reset_incarnation,
    "disable": lambda azure, _: azure.disable(),
    "say": SimulatedAzure.report_line_with_time,
}


def perform_action(azure: SimulatedAzure, action: Action) -> Event | None:
    """Perform it now; return its event. Raises UnknownEvent, InvalidTransition."""
    (name,) = action.given_keys()
    return _PERFORM[name](azure, getattr(action, name))


def load_packaged_playbooks() -> dict[str, Playbook]:
    return {name: load_playbook(name) for name in _PACKAGED}


def load_playbook(name_or_path: str | Path) -> Playbook:
    """Return a playbook by name or file. Raises ConfigError with file, key path and reason."""
    name = str(name_or_path)
    path = _PACKAGED.get(name, Path(name))
    if path.suffix not in (".yaml", ".yml"):
        choices = describe_choices(name, _PACKAGED)
        raise ConfigError(
            f"expected a YAML file or the name of a playbook, got {name!r}; {choices}"
        )
    try:
        return Playbook.model_validate(
            YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: expected a readable file in UTF-8, {error}") from error
    except YAMLError as error:
        raise ConfigError(f"{name}: expected YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        lines = (f"{name}: {line}" for line in describe_errors(error))
        raise ConfigError("\n".join(lines)) from error


def describe_errors(error: ValidationError) -> list[str]:
    """Return a line for each error: the key path, what was expected, and what was there."""
    lines = []
    for details in error.errors():
        kind, text = details["type"], details["msg"].removeprefix("Value error, ")
        text = text.replace("Input should be ", "expected ", 1)
        text = text.replace("expected True", "expected true")
        if kind in ("extra_forbidden", "unexpected_keyword_argument"):
            text = "unknown key"
        elif kind == "missing":
            text = "expected a value, got none"
        elif kind != "value_error" or "got" not in text:
            text += f", got {details['input']!r}"
        lines.append(f"{format_path(details['loc']) or 'the document'}: {text}")
    return lines


async def play_playbook(azure: SimulatedAzure, playbook: Playbook) -> None:
    """Perform every step at its time, then wait until no event is left. Repeat if it has ``loop``.

    A step that is no longer possible is skipped and reported: the software under test may be
    faster or slower than the playbook.
    """
    while True:
        started_at = azure.clock.now()
        for step in playbook.steps:
            if step.at is not None:
                due = started_at + azure.scale_duration(step.at)
                await azure.clock.sleep(max((due - azure.clock.now()).total_seconds(), 0.0))
            else:
                if step.when is not None:
                    await azure.wait_for(step.when.event, step.when.is_)
                await azure.clock.sleep(azure.scale_duration(step.after or 0.0).total_seconds())
            try:
                perform_action(azure, step)
            except InvalidTransition as error:
                azure.report_line_with_time(f"a step is left out: {error}")
        await azure.wait_until(lambda: not azure.events)
        if not playbook.loop:
            return
