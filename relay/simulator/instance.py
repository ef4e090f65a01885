"""The instance metadata of a simulated VM."""

from __future__ import annotations

import uuid
from typing import Any

from relay.simulator.setup import VM

INSTANCE_VERSIONS = tuple(
    """
    2017-03-01 2017-04-02 2017-08-01 2017-12-01 2018-02-01 2018-04-02 2018-10-01 2019-02-01
    2019-03-11 2019-04-30 2019-06-01 2019-06-04 2019-08-01 2019-08-15 2019-11-01 2020-06-01
    2020-07-15 2020-09-01 2020-10-01 2020-12-01 2021-01-01 2021-02-01 2021-03-01 2021-05-01
    2021-10-01 2021-11-01 2021-11-15 2021-12-13 2023-07-01 2023-11-15 2024-03-15 2024-07-17
    2025-04-07
    """.split()  # noqa: SIM905  # a list would take a line for each
)
"""The api-versions of instance metadata, oldest first.

Source: Microsoft, "Azure Instance Metadata Service".
"""

_UUID_NAMESPACE = uuid.UUID("a2b7c4d0-1690-4254-9169-254169254000")
_BASE36_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def compute_document(vm: VM) -> dict[str, Any]:
    """Return the ``compute`` part of the instance document, with the fields that clients need."""
    scale_set = vm.scale_set_name
    host_name = vm.name.lower()
    resource = f"virtualMachines/{vm.name}"
    if vm.uniform_set_and_number is not None:
        _, number = vm.uniform_set_and_number
        host_name = f"{scale_set.lower()}{_encode_base36(number):0>6}"
        resource = f"virtualMachineScaleSets/{scale_set}/virtualMachines/{number}"
    placement_group = vm.placement_group
    if placement_group is None:
        placement_group = _stable_uuid(f"placement/{scale_set}") if scale_set else ""
    vm_path = f"{vm.subscription}/{vm.resource_group}/{vm.name}"
    return {
        "azEnvironment": "AzurePublicCloud",
        "location": vm.location,
        "name": vm.name,
        "osProfile": {
            "adminUsername": "azureuser",
            "computerName": vm.computer_name if vm.computer_name is not None else host_name,
            "disablePasswordAuthentication": "true",
        },
        "osType": "Linux",
        "placementGroupId": placement_group,
        "platformFaultDomain": "0",
        "platformUpdateDomain": "0",
        "provider": "Microsoft.Compute",
        "resourceGroupName": vm.resource_group,
        "resourceId": f"/subscriptions/{vm.subscription}/resourceGroups/{vm.resource_group}"
        f"/providers/Microsoft.Compute/{resource}",
        "subscriptionId": vm.subscription,
        "tags": ";".join(f"{key}:{value}" for key, value in vm.tags.items()),
        "tagsList": [{"name": key, "value": value} for key, value in vm.tags.items()],
        "vmId": vm.vm_id or _stable_uuid(f"vm/{vm_path}"),
        "vmScaleSetName": scale_set,
        "vmSize": "Standard_D2s_v3",
        "zone": vm.zone,
    }


def instance_document(vm: VM) -> dict[str, Any]:
    """Return the whole instance document."""
    addresses = {
        "ipAddress": [{"privateIpAddress": "10.0.0.4", "publicIpAddress": ""}],
        "subnet": [{"address": "10.0.0.0", "prefix": "24"}],
    }
    interface = {"ipv4": addresses, "ipv6": {"ipAddress": []}, "macAddress": "000D3A000001"}
    return {"compute": compute_document(vm), "network": {"interface": [interface]}}


def _stable_uuid(name: str) -> str:
    """Return an UUID that is always the same for a name."""
    return str(uuid.uuid5(_UUID_NAMESPACE, name))


def _encode_base36(number: int) -> str:
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = _BASE36_DIGITS[rest] + digits
    return digits or "0"
