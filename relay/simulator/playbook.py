"""Playbooks: what happens when, as YAML. The same actions are what the control API takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from relay.errors import ConfigError
from relay.settings import Duration, Section
from relay.simulator.event import Event, Plan
from relay.simulator.faults import Fault
from relay.simulator.scope import Setup
from relay.simulator.stage import Stage


class Change(Section):
    """What ``update`` changes of a live event; what is left out stays."""

    event: str
    """EventId or name."""
    notice: Duration | None = None
    """From now to the new NotBefore."""
    resources: tuple[str, ...] | None = None
    description: str | None = None
    duration: int | None = None
    fields: dict[str, Any] | None = None


class OthersApproval(Section):
    """An approval that comes from elsewhere."""

    event: str
    """EventId or name."""
    vm: str
    """Who approves."""


class When(Section):
    """What a step waits for. A state that is already past counts as reached."""

    event: str
    """EventId or name of an event that an earlier step scheduled."""
    is_: Literal["approved", "started", "gone"] = Field(alias="is")


class Action(Section):
    """One thing to do."""

    schedule: Plan | None = None
    start: str | None = None
    end: str | None = None
    cancel: str | None = None
    update: Change | None = None
    approve: OthersApproval | None = None
    fault: Fault | None = None
    clear_faults: Literal[True] | None = None
    skip_incarnations: Annotated[int, Field(ge=1)] | None = None
    reset_incarnation: Annotated[int, Field(ge=0)] | None = None
    disable: Literal[True] | None = None
    say: str | None = None

    @model_validator(mode="after")
    def _one_thing(self) -> Action:
        if len(given := self.given()) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(Action.model_fields)}, got {' and '.join(given) or 'none'}"
            )
        return self

    def given(self) -> list[str]:
        """What is to be done, as its key."""
        return [name for name in Action.model_fields if getattr(self, name) is not None]


class Step(Action):
    """An action and its time. Times are ``5s`` or ``15m`` of Azure, and run ``scale`` times faster."""

    at: Duration | None = None
    """Since the start of the playbook."""
    after: Duration | None = None
    """Since the step before, or since what ``when`` waits for."""
    when: When | None = None

    @model_validator(mode="after")
    def _one_time(self) -> Step:
        if self.at is not None and (self.after is not None or self.when is not None):
            raise ValueError("expected at alone, or after and when; got at with another")
        return self


def _names_are_vms(given: object) -> object:
    """Let ``vms: [db-0]`` stand for ``vms: [{name: db-0}]``."""
    if isinstance(given, dict) and isinstance(given.get("vms"), list):
        return given | {"vms": [{"name": vm} if isinstance(vm, str) else vm for vm in given["vms"]]}
    return given


class Playbook(Section):
    """One case, told from its start to its end."""

    description: str
    """A line for ``simulate --list``."""
    source: str = ""
    """Where the case is described."""
    azure: Annotated[Setup, BeforeValidator(_names_are_vms)] = Setup()
    """The VMs and the habits of this Azure."""
    loop: bool = False
    """Begin again when every step is done and every event is gone."""
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _steps_know_their_events(self) -> Playbook:
        known: set[str | None] = set()
        for number, step in enumerate(self.steps):
            for ref in _refs(step):
                if ref not in known:
                    raise ValueError(
                        f"steps[{number}]: expected the name or id of an event that an earlier step schedules, got {ref!r}"
                    )
            if step.schedule is not None:
                known |= {step.schedule.name, step.schedule.id}
        return self


def _refs(step: Step) -> Iterable[str]:
    """The events that a step needs, as they are called in it."""
    named = (part.event for part in (step.update, step.approve, step.when) if part is not None)
    return (ref for ref in (step.start, step.end, step.cancel, *named) if ref is not None)


ACTIONS = tuple(Action.model_fields)
"""Every action of a step, and of ``POST /sim/<action>``."""

_DO: Mapping[str, Callable[[Stage, Any], Event | None]] = {
    "schedule": Stage.schedule,
    "start": Stage.start,
    "end": Stage.end,
    "cancel": Stage.cancel,
    "update": lambda stage, change: stage.update(**dict(change)),
    "approve": lambda stage, approval: stage.approve(approval.event, approval.vm),
    "fault": Stage.fault,
    "clear_faults": lambda stage, _: stage.clear_faults(),
    "skip_incarnations": Stage.skip_incarnations,
    "reset_incarnation": Stage.reset_incarnation,
    "disable": lambda stage, _: stage.disable(),
    "say": Stage.tell,
}


def perform(stage: Stage, action: Action) -> Event | None:
    """Do one thing now. The event that it was done to, else None. Raises UnknownEvent, WrongMove."""
    name = action.given()[0]
    return _DO[name](stage, getattr(action, name))


def list_playbooks() -> dict[str, Playbook]:
    """The playbooks that come with the package, by name."""
    return {
        name: _read(entry.read_text(encoding="utf-8"), name)
        for name, entry in sorted(_shipped().items())
    }


def load_playbook(name_or_path: str | Path) -> Playbook:
    """A shipped playbook by its name, or a file. Raises ConfigError, naming file, key path, what was expected and what came."""
    name = str(name_or_path)
    shipped = _shipped()
    if name in shipped:
        return _read(shipped[name].read_text(encoding="utf-8"), f"{name}.yaml")
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        near = difflib.get_close_matches(name, shipped, n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"there are {', '.join(sorted(shipped))}"
        )
        raise ConfigError(f"expected a YAML file or the name of a playbook, got {name!r}; {hint}")
    try:
        return _read(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: expected a readable file in UTF-8, {error}") from error


def problems(errors: Iterable[ErrorDetails]) -> Sequence[str]:
    """What is wrong, a line each: key path, what was expected, what came."""
    return [f"{_path(error['loc'])}: {_expected(error)}" for error in errors]


def _shipped() -> Mapping[str, Traversable]:
    folder = files("relay.simulator") / "playbooks"
    return {
        entry.name.removesuffix(".yaml"): entry
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    }


def _read(text: str, file: str) -> Playbook:
    try:
        return Playbook.model_validate(YAML(typ="safe", pure=True).load(text))
    except YAMLError as error:
        raise ConfigError(f"{file}: expected YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{file}: {problem}" for problem in problems(error.errors()))
        ) from error


def _path(location: tuple[int | str, ...]) -> str:
    return (
        "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in location
        ).removeprefix(".")
        or "the document"
    )


def _expected(error: ErrorDetails) -> str:
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return "unknown key"
    if error["type"] == "missing":
        return "expected a value, got none"
    text = error["msg"].removeprefix("Value error, ")
    if text.startswith("Input should be "):
        text = f"expected {text.removeprefix('Input should be ')}"
    if error["type"] == "value_error" and "got" in text:
        return text
    return f"{text}, got {error['input']!r}"
