"""The VMs that the simulator stands in for, and what instance metadata says about each."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

INSTANCE_VERSIONS = (
    *(
        "2017-03-01",
        "2017-04-02",
        "2017-08-01",
        "2017-12-01",
        "2018-02-01",
        "2018-04-02",
        "2018-10-01",
        "2019-02-01",
    ),
    *(
        "2019-03-11",
        "2019-04-30",
        "2019-06-01",
        "2019-06-04",
        "2019-08-01",
        "2019-08-15",
        "2019-11-01",
        "2020-06-01",
    ),
    *(
        "2020-07-15",
        "2020-09-01",
        "2020-10-01",
        "2020-12-01",
        "2021-01-01",
        "2021-02-01",
        "2021-03-01",
        "2021-05-01",
    ),
    *(
        "2021-10-01",
        "2021-11-01",
        "2021-11-15",
        "2021-12-13",
        "2023-07-01",
        "2023-11-15",
        "2024-03-15",
        "2024-07-17",
    ),
    "2025-04-07",
)
"""The api-versions of instance metadata, oldest first (Microsoft, "Azure Instance Metadata Service")."""

_SPACE = uuid.UUID("a2b7c4d0-1690-4254-9169-254169254000")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class VM:
    """One VM of the scope. What is left out follows from ``name``, so that a test gets the same VM every time."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    name: str
    """As ``Resources`` names it: a VM's name, or ``set_18`` in a uniform scale set."""
    scale_set: str | None = None
    """None: what stands before ``_18`` in the name; "" for a VM on its own."""
    computer_name: str | None = None
    """None: the host name that Azure would give: in a uniform scale set the number is in base 36 (``set00000i``)."""
    vm_id: str | None = None
    placement_group: str | None = None
    resource_group: str = "simulated"
    subscription: str = "00000000-0000-4000-8000-000000000000"
    location: str = "norwaywest"
    zone: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def member(self) -> tuple[str, int] | None:
        """Scale set and number of a VM in a uniform scale set; None for any other."""
        match = re.fullmatch(r"(.+)_(\d+)", self.name)
        if match is None or self.scale_set not in (None, match[1]):
            return None
        return match[1], int(match[2])

    @property
    def set_name(self) -> str:
        """The scale set's name; empty for a VM on its own."""
        if self.scale_set is not None:
            return self.scale_set
        return self.member[0] if self.member else ""


def compute(vm: VM) -> dict[str, Any]:
    """The ``compute`` part of the instance document: of its many fields those that clients of Scheduled Events look at."""
    group, member = vm.set_name, vm.member
    host = f"{group.lower()}{_base36(member[1]):0>6}" if member else vm.name.lower()
    placement = vm.placement_group
    if placement is None:
        placement = str(uuid.uuid5(_SPACE, f"placement/{group}")) if group else ""
    inside = (
        f"virtualMachineScaleSets/{group}/virtualMachines/{member[1]}"
        if member
        else f"virtualMachines/{vm.name}"
    )
    computer = vm.computer_name if vm.computer_name is not None else host
    return {
        "azEnvironment": "AzurePublicCloud",
        "location": vm.location,
        "name": vm.name,
        "osProfile": {
            "adminUsername": "azureuser",
            "computerName": computer,
            "disablePasswordAuthentication": "true",
        },
        "osType": "Linux",
        "placementGroupId": placement,
        "platformFaultDomain": "0",
        "platformUpdateDomain": "0",
        "provider": "Microsoft.Compute",
        "resourceGroupName": vm.resource_group,
        "resourceId": f"/subscriptions/{vm.subscription}/resourceGroups/{vm.resource_group}/providers/Microsoft.Compute/{inside}",
        "subscriptionId": vm.subscription,
        "tags": ";".join(f"{key}:{value}" for key, value in vm.tags.items()),
        "tagsList": [{"name": key, "value": value} for key, value in vm.tags.items()],
        "vmId": vm.vm_id
        or str(uuid.uuid5(_SPACE, f"vm/{vm.subscription}/{vm.resource_group}/{vm.name}")),
        "vmScaleSetName": group,
        "vmSize": "Standard_D2s_v3",
        "zone": vm.zone,
    }


def instance(vm: VM) -> dict[str, Any]:
    """The whole instance document."""
    addresses = {
        "ipAddress": [{"privateIpAddress": "10.0.0.4", "publicIpAddress": ""}],
        "subnet": [{"address": "10.0.0.0", "prefix": "24"}],
    }
    interface = {"ipv4": addresses, "ipv6": {"ipAddress": []}, "macAddress": "000D3A000001"}
    return {"compute": compute(vm), "network": {"interface": [interface]}}


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = _DIGITS[rest] + digits
    return digits or "0"
