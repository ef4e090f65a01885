"""The state machine: how events come, change and go, and what nobody can make them do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from relay.simulator.event import Event, Plan
from relay.simulator.scope import InvalidTransition, Scope, UnknownEvent
from relay.simulator.setup import VM, Setup, compute_document
from tests.clocks import ManualClock
from tests.events.strategies import azure_event

Transition = Callable[[datetime, str, Event | None], None]
T0 = datetime(2022, 4, 11, 22, 11, 58, tzinfo=UTC)
VMS = (VM("vm-0"), VM("vm-1"))
BOTH = ("vm-0", "vm-1")


def later(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


class TimedScope(Scope):
    """A scope whose time a test sets. It is `T0` at first."""

    def __init__(self, setup: Setup, on_transition: Transition) -> None:
        self.manual_clock = ManualClock(T0)
        self.on_transition = on_transition
        super().__init__(setup, clock=self.manual_clock)

    @override
    def tell(self, at: datetime, kind: str, event: Event | None, text: str) -> None:
        self.on_transition(at, kind, event)

    def at(self, moment: datetime) -> Self:
        self.manual_clock.set_wall_clock(moment)
        return self


def scope(on_transition: Transition = lambda *_: None, **setup: Any) -> TimedScope:
    return TimedScope(Setup(**{"vms": VMS} | setup), on_transition)


def statuses(machine: TimedScope) -> dict[str, str]:
    return {event["EventId"]: event["EventStatus"] for event in machine.document()["Events"]}


def test_the_example_of_the_pages_comes_out_document_for_document() -> None:
    """Microsoft, "Scheduled Events", sample responses: four documents of one live migration."""
    description = (
        "Virtual machine is being paused because of a memory-preserving Live Migration operation."
    )
    example = azure_event(Description=description)
    names = tuple(example["Resources"])
    machine = scope(vms=tuple(map(VM, names)))
    assert machine.document() == {"DocumentIncarnation": 1, "Events": []}
    plan = Plan(type="Freeze", id=example["EventId"], resources=names, duration=5, starts_after=0.0)
    machine.schedule(plan)
    document = machine.document()
    assert document == {"DocumentIncarnation": 2, "Events": [example]}
    assert list(document["Events"][0]) == list(example)
    machine.at(later(900)).tick()
    started = example | {"EventStatus": "Started", "NotBefore": ""}
    assert machine.document() == {"DocumentIncarnation": 3, "Events": [started]}
    machine.at(later(900 + 600)).tick()
    assert machine.document() == {"DocumentIncarnation": 4, "Events": []}


def test_an_approval_by_any_vm_brings_the_start_forward_for_all_resources() -> None:
    machine = scope()
    machine.schedule(Plan(id="A", resources=BOTH, starts_after=2.0))
    machine.at(later(10)).accept_start_request(["a"], "vm-1")
    assert statuses(machine) == {"A": "Scheduled"}
    machine.at(later(11.9)).tick()
    assert statuses(machine) == {"A": "Scheduled"}
    machine.at(later(12)).tick()
    assert statuses(machine) == {"A": "Started"}


def test_where_all_must_approve_one_is_not_enough() -> None:
    machine = scope()
    machine.schedule(
        Plan(id="A", resources=(*BOTH, "a-stranger"), approvals="all", starts_after=0.0)
    )
    machine.at(later(1)).accept_start_request(["A"], "vm-0")
    machine.at(later(2)).accept_start_request(["A"], "vm-0")
    assert statuses(machine) == {"A": "Scheduled"}
    machine.at(later(3)).accept_start_request(["A"], "vm-1")
    assert statuses(machine) == {"A": "Started"}
    assert machine.event("A").approved_by == BOTH


def test_an_ignored_approval_leaves_the_start_at_not_before() -> None:
    machine = scope()
    machine.schedule(Plan(id="A", notice=60.0, approvals="ignored", starts_after=0.0))
    machine.at(later(1)).accept_start_request(["A"], "vm-0")
    machine.at(later(59.9)).tick()
    assert statuses(machine) == {"A": "Scheduled"}
    machine.at(later(60)).tick()
    assert statuses(machine) == {"A": "Started"}


def test_an_approval_of_several_events_of_which_one_is_unknown_approves_none() -> None:
    machine = scope()
    machine.schedule(Plan(id="A"))
    with pytest.raises(UnknownEvent, match="'B'"):
        machine.at(later(1)).accept_start_request(["A", "B"], "vm-0")
    assert not machine.event("A").approved


def test_a_hardware_failure_is_first_seen_as_started() -> None:
    machine = scope()
    machine.schedule(Plan(id="A", started=True, lasts=60.0))
    entry = machine.document()["Events"][0]
    assert (entry["EventStatus"], entry["NotBefore"]) == ("Started", "")
    machine.at(later(60)).tick()
    assert statuses(machine) == {}


@pytest.mark.parametrize(("started", "move"), [(True, "cancel"), (True, "start"), (False, "end")])
def test_what_cannot_happen_in_a_state_is_refused(started: bool, move: str) -> None:
    machine = scope()
    machine.schedule(Plan(id="A", started=started))
    with pytest.raises(InvalidTransition, match=r"expected A to be \w+, it is \w+"):
        getattr(machine.at(later(1)), move)("A")


def test_a_new_notice_moves_the_start_of_an_event_that_nobody_approved() -> None:
    machine = scope()
    machine.schedule(Plan(id="A", notice=60.0, starts_after=0.0))
    machine.at(later(30)).update_event("A", notice=120.0)
    assert machine.document()["Events"][0]["NotBefore"] == "Mon, 11 Apr 2022 22:14:28 GMT"
    machine.at(later(149)).tick()
    assert statuses(machine) == {"A": "Scheduled"}
    machine.at(later(150)).tick()
    assert statuses(machine) == {"A": "Started"}


def test_the_incarnation_can_skip_numbers_and_start_again() -> None:
    machine = scope()
    machine.skip_incarnations(40)
    machine.schedule(Plan(id="A"))
    assert machine.incarnation == 42
    machine.at(later(1)).reset_incarnation(1)
    assert machine.document()["DocumentIncarnation"] == 1
    assert statuses(machine) == {"A": "Scheduled"}


def test_waits_and_notice_run_as_many_times_faster_as_asked() -> None:
    machine = scope(scale=60.0)
    machine.schedule(Plan(id="A", notice=900.0, starts_after=60.0, lasts=600.0))
    moments = []
    while (due := machine.next_transition_at()) is not None:
        machine.at(due).tick()
        moments.append((due - T0).total_seconds())
    assert moments == [16.0, 26.0]


def test_the_first_call_waits_until_the_service_is_on() -> None:
    machine = scope(first_call=120.0)
    assert machine.at(later(10)).enable_by_call() == timedelta(seconds=120)
    assert machine.at(later(70)).enable_by_call() == timedelta(seconds=60)
    assert machine.at(later(140)).enable_by_call() == timedelta(0)
    machine.schedule(Plan(id="A"))
    machine.disable()
    assert machine.incarnation == 1
    assert machine.at(later(200)).enable_by_call() == timedelta(seconds=120)
    assert statuses(machine) == {"A": "Scheduled"}


def test_without_broadcast_a_vm_sees_what_names_it() -> None:
    machine = scope(broadcast=False)
    machine.schedule(Plan(id="A", resources=("vm-0",)))
    assert len(machine.document(vm="vm-0")["Events"]) == 1
    assert machine.document(vm="vm-1")["Events"] == []


def test_not_before_is_rfc_1123_and_never_later_than_it_is() -> None:
    """The format has whole seconds. Cutting them keeps the promise of NotBefore."""
    machine = scope().at(T0 + timedelta(microseconds=999_999))
    machine.schedule(Plan(notice=900.0))
    assert machine.document()["Events"][0]["NotBefore"] == "Mon, 11 Apr 2022 22:26:58 GMT"


@pytest.mark.parametrize(
    ("vm", "scale_set", "computer_name"),
    [
        (VM("set_18"), "set", "set00000i"),
        (VM("set_0"), "set", "set000000"),
        (VM("db-0"), "", "db-0"),
        (VM("FrontEnd_IN_0", scale_set=""), "", "frontend_in_0"),
        (VM("flex_ab12", scale_set="flex"), "flex", "flex_ab12"),
        (VM("set_18", computer_name="other"), "set", "other"),
    ],
)
def test_a_vm_knows_its_scale_set_and_host_name(vm: VM, scale_set: str, computer_name: str) -> None:
    about = compute_document(vm)
    assert about["vmScaleSetName"] == scale_set
    assert about["osProfile"]["computerName"] == computer_name


def test_vms_of_one_scale_set_share_the_placement_group_and_nothing_else() -> None:
    first, second, stranger = (compute_document(VM(name)) for name in ("a_0", "a_1", "b_0"))
    assert first["placementGroupId"] == second["placementGroupId"] != stranger["placementGroupId"]
    assert len({first["vmId"], second["vmId"], stranger["vmId"]}) == 3
    assert compute_document(VM("a_0")) == first


# laws

TimedAction = tuple[float, str, Any]  # seconds after the one before, what, and with what
EVENTS = st.sampled_from("ABC")
SECONDS = st.integers(0, 40).map(float)
PLANS = st.builds(
    Plan,
    id=EVENTS,
    resources=st.sampled_from([("vm-0",), BOTH, ()]),
    notice=SECONDS,
    starts_after=SECONDS,
    lasts=SECONDS,
    approvals=st.sampled_from(["any", "all", "ignored"]),
    started=st.booleans(),
)
CHANGES = st.fixed_dictionaries(
    {}, optional={"notice": SECONDS, "duration": st.integers(0, 1), "resources": st.just(BOTH)}
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(SECONDS, st.just("schedule"), PLANS),
        st.tuples(SECONDS, st.sampled_from(["start", "end", "cancel", "tick"]), EVENTS),
        st.tuples(SECONDS, st.just("update"), st.tuples(EVENTS, CHANGES)),
        st.tuples(SECONDS, st.just("approve"), st.tuples(EVENTS, st.sampled_from(BOTH))),
        st.tuples(SECONDS, st.just("skip"), st.integers(1, 3)),
    ),
    max_size=25,
)


def perform(machine: TimedScope, action: TimedAction, now: datetime) -> None:
    _, what, given = action
    try:
        match what:
            case "schedule":
                machine.at(now).schedule(given)
            case "update":
                machine.at(now).update_event(given[0], **given[1])
            case "approve":
                machine.at(now).accept_start_request([given[0]], given[1])
            case "skip":
                machine.at(now).skip_incarnations(given)
            case "tick":
                machine.at(now).tick()
            case _:
                getattr(machine.at(now), what)(given)
    except (UnknownEvent, InvalidTransition):
        pass


@given(ACTIONS)
def test_an_event_only_goes_from_scheduled_to_started_to_gone(actions: list[TimedAction]) -> None:
    told: dict[str, list[str]] = {}

    def on_transition(_at: datetime, kind: str, event: Event | None) -> None:
        if event is not None and kind in ("scheduled", "started", "completed", "canceled"):
            told.setdefault(event.event_id, []).append(kind)

    machine, now = scope(on_transition), T0
    for action in actions:
        now += timedelta(seconds=action[0])
        perform(machine, action, now)
    for states in told.values():
        lives = "".join(state[:3] + " " for state in states)
        while lives:
            life = next(
                path
                for path in ("sch sta com ", "sch can ", "sta com ", "sch sta ", "sch ", "sta ")
                if lives.startswith(path)
            )
            lives = lives.removeprefix(life)
            assert not lives or life.endswith(("com ", "can "))


@given(ACTIONS)
def test_nothing_starts_before_not_before_unless_it_is_approved(actions: list[TimedAction]) -> None:
    by_hand: set[str] = set()

    def on_transition(at: datetime, kind: str, event: Event | None) -> None:
        if (
            kind == "started"
            and event is not None
            and not event.plan.started
            and event.event_id not in by_hand
        ):
            brought_forward = event.approved and event.plan.approvals != "ignored"
            assert brought_forward or at >= event.not_before

    machine = scope(on_transition)
    now = T0
    for action in actions:
        now += timedelta(seconds=action[0])
        machine.at(now).tick()
        if action[1] == "start":
            by_hand.add(action[2])
        perform(machine, action, now)
        by_hand.clear()
