"""What a simulated Azure consists of: its VMs, and how it behaves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from relay.settings import Duration


@dataclass(frozen=True, slots=True)
class VM:
    """One VM of the scope. Defaults follow from ``name``: a test always gets the same VM."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    name: str
    """Its name in ``Resources``: the VM's name, or ``set_18`` in a uniform scale set."""
    scale_set: str | None = None
    """None: the part of the name before ``_18``; "": the VM has no scale set."""
    computer_name: str | None = None
    """None: Azure's host name, which has the number in base 36: ``set00000i``."""
    vm_id: str | None = None
    placement_group: str | None = None
    resource_group: str = "simulated"
    subscription: str = "00000000-0000-4000-8000-000000000000"
    location: str = "norwaywest"
    zone: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def uniform_set_and_number(self) -> tuple[str, int] | None:
        """Scale set and number in a uniform scale set; None for another VM."""
        match = re.fullmatch(r"(.+)_(\d+)", self.name)
        if match is None or self.scale_set not in (None, match[1]):
            return None
        return match[1], int(match[2])

    @property
    def scale_set_name(self) -> str:
        """The name of the scale set; empty without one."""
        if self.scale_set is not None:
            return self.scale_set
        return self.uniform_set_and_number[0] if self.uniform_set_and_number else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The VMs and the behavior of the simulated Azure.

    Durations are seconds, in YAML text such as ``2m``. They pass ``scale`` times faster. Raises
    ValueError without VMs, for two VMs of one name, and for numbers out of range.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    vms: tuple[VM, ...] = (VM("vm-0"),)
    scale: float = 1.0
    """How many times faster than Azure all waits and notices pass."""
    incarnation: int = 1
    """The first DocumentIncarnation."""
    broadcast: bool = True
    """False: a VM sees only events that name it, as GPU VMs of a set with one fault domain do."""
    first_call: Duration = 0.0
    """How long the first call waits for its answer; Azure takes up to two minutes."""
    events_after: Duration = 0.0
    """From the first call until events are shown; Azure takes up to five minutes."""
    disabled_after: Duration = 86400.0
    """After so long without a call, the service is off and the next call is a first call."""
    rate_limit: int | None = 5
    """Calls that a VM may make within a second; None: no limit."""
    instance_metadata: bool = True
    """False: instance metadata is answered 404."""

    def __post_init__(self) -> None:
        names = [vm.name for vm in self.vms]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected at least one VM and no name twice, got {names}")
        if self.scale <= 0 or (self.rate_limit is not None and self.rate_limit < 1):
            raise ValueError(
                "expected scale above 0 and rate_limit of 1 or more, "
                f"got {self.scale:g} and {self.rate_limit}"
            )
