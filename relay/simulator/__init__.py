"""An Azure to test with: a stand-in for IMDS that lets maintenance happen when a test, a playbook or a person wants it.

Use it as ``async with Simulator(Setup(vms=(VM("vm-0"),))) as sim``, or run it with ``run_simulator``.
"""

from __future__ import annotations

from relay.simulator.event import Event, Plan
from relay.simulator.faults import Fault
from relay.simulator.instance import VM
from relay.simulator.playbook import Playbook, list_playbooks, load_playbook, perform
from relay.simulator.run import play, run_simulator
from relay.simulator.scope import InvalidTransition, Setup, UnknownEvent
from relay.simulator.server import Simulator
from relay.simulator.stage import Call

__all__ = [
    "VM",
    "Call",
    "Event",
    "Fault",
    "InvalidTransition",
    "Plan",
    "Playbook",
    "Setup",
    "Simulator",
    "UnknownEvent",
    "list_playbooks",
    "load_playbook",
    "perform",
    "play",
    "run_simulator",
]
