"""A simulator of Azure IMDS: maintenance happens when a test, a playbook or a person wants it.

Use ``async with Simulator(Setup(vms=(VM("vm-0"),))) as sim``, or ``imds-relay simulate``. Of the
relay it knows which fields each api-version has, and how Azure writes names. docs/simulator.md
describes it. A `Plan` says what shall happen to an `Event`. `play_playbook` performs all steps of a
`Playbook`, each at its time.
"""

from __future__ import annotations

from relay.simulator.event import Event, Plan
from relay.simulator.playbook import load_packaged_playbooks
from relay.simulator.server import Simulator
from relay.simulator.setup import VM, Fault, Setup

__all__ = ["VM", "Event", "Fault", "Plan", "Setup", "Simulator", "load_packaged_playbooks"]
