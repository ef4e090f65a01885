"""What a simulated Azure consists of: VMs with their instance metadata, and how it fails.

A fault replaces the right answer (`replace_answer`) or changes it (`distort_answer`). The server
handles ``processed``: it then lets Azure accept the StartRequest first.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Annotated, Any, Final, Literal, get_args

import orjson
from aiohttp import web
from pydantic import BeforeValidator, ConfigDict, with_config

from relay.events.model import other_instance_names
from relay.settings import Duration


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class VM:
    """One VM of the scope. Defaults follow from ``name``: a test always gets the same VM."""

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
    def uniform(self) -> tuple[str, int] | None:
        """Scale set and number in a uniform scale set; None for another VM."""
        match = re.fullmatch(r"(.+)_(\d{1,9})", self.name, re.ASCII)
        if match is None or self.scale_set not in (None, match[1]):
            return None
        return match[1], int(match[2])

    @property
    def scale_set_name(self) -> str:
        if self.scale_set is not None:
            return self.scale_set
        return self.uniform[0] if self.uniform else ""


def _vm_by_name(vm: object) -> object:
    return {"name": vm} if isinstance(vm, str) else vm


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The VMs and the behavior of the simulated Azure: docs/simulator.md#playbooks.

    Durations are seconds, in YAML text such as ``2m``. They pass ``scale`` times faster. Raises
    ValueError without VMs, for two VMs of one name, and for numbers out of range.
    """

    vms: tuple[Annotated[VM, BeforeValidator(_vm_by_name)], ...] = (VM("vm-0"),)
    scale: float = 1.0
    incarnation: int = 1
    broadcast: bool = True
    first_call: Duration = 0.0
    rate_limit: int | None = 5
    instance_metadata: bool = True

    def __post_init__(self) -> None:
        names = [vm.name for vm in self.vms]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected at least one VM and no name twice, got {names}")
        if self.scale <= 0 or (self.rate_limit is not None and self.rate_limit < 1):
            raise ValueError(
                "expected scale above 0 and rate_limit of 1 or more, "
                f"got {self.scale:g} and {self.rate_limit}"
            )


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


def compute_document(vm: VM) -> dict[str, Any]:
    scale_set = vm.scale_set_name
    host_name = vm.name.lower()
    resource = f"virtualMachines/{vm.name}"
    if vm.uniform is not None:
        host_name = next(other_instance_names(vm.name)).lower()
        resource = f"virtualMachineScaleSets/{scale_set}/virtualMachines/{vm.uniform[1]}"
    placement_group = vm.placement_group
    if placement_group is None:
        made = str(uuid.uuid5(_UUID_NAMESPACE, f"placement/{scale_set}"))
        placement_group = made if scale_set else ""
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
        "vmId": vm.vm_id or str(uuid.uuid5(_UUID_NAMESPACE, f"vm/{vm_path}")),
        "vmScaleSetName": scale_set,
        "vmSize": "Standard_D2s_v3",
        "zone": vm.zone,
    }


def instance_document(vm: VM) -> dict[str, Any]:
    addresses = {
        "ipAddress": [{"privateIpAddress": "10.0.0.4", "publicIpAddress": ""}],
        "subnet": [{"address": "10.0.0.0", "prefix": "24"}],
    }
    interface = {"ipv4": addresses, "ipv6": {"ipAddress": []}, "macAddress": "000D3A000001"}
    return {"compute": compute_document(vm), "network": {"interface": [interface]}}


_InPlaceOfAnswer = Literal["status", "hang", "reset", "redirect"]
_WithinAnswer = Literal[
    "delay", "empty", "truncated", "malformed", "no-events", "duplicate", "wrong-type"
]
Kind = Literal[_InPlaceOfAnswer, _WithinAnswer]
Target = Literal["document", "approval", "instance", "any"]
JSON: Final = "application/json"


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of some calls; without ``calls`` and ``lasts`` of the next one.

    docs/simulator.md#faults has a row for each kind and field.

    Durations are seconds, and pass ``scale`` times faster.
    """

    kind: Kind = "status"
    on: Target = "document"
    vm: str | None = None
    calls: int | None = None
    lasts: Duration | None = None
    """With ``calls``, whichever ends first."""
    processed: bool = False
    status: int = 500
    retry_after: Duration | None = None
    """Sent in whole seconds, and at least one."""
    time: Duration = 5.0
    location: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def replaces_answer(self) -> bool:
        return self.kind in get_args(_InPlaceOfAnswer)

    @property
    def label(self) -> str:
        return str(self.status) if self.kind == "status" else self.kind


async def replace_answer(
    request: web.Request, fault: Fault, *, span: Callable[[float], timedelta]
) -> web.Response:
    """Return the answer of a fault that replaces it. A hang lasts until the client ends."""
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "reset":
        if request.transport is not None:
            connection: socket.socket = request.transport.get_extra_info("socket")
            # SO_LINGER with 0 makes the close send RST: socket(7)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.transport.abort()
        return web.Response()
    if fault.kind == "redirect":
        location = fault.location or str(request.rel_url.update_query(redirected="true"))
        return web.Response(status=302, headers={"Location": location})
    headers = {}
    if fault.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(span(fault.retry_after).total_seconds())))
    body = orjson.dumps({"error": f"Simulated fault: {fault.status}"})
    return web.Response(status=fault.status, headers=headers, body=body, content_type=JSON)


def distort_answer(body: bytes, fault: Fault) -> web.Response:
    content_type = "text/html" if fault.kind == "wrong-type" and body else JSON
    match fault.kind if body else None:
        case "empty":
            body = b""
        case "truncated":
            body = body[: len(body) // 2]
        case "malformed":
            body = body.replace(b":", b"=", 1)
        case "no-events":
            document = orjson.loads(body)
            document.pop("Events", None)
            body = orjson.dumps(document)
        case "duplicate":
            document = orjson.loads(body)
            pairs = ((event, event | dict(fault.fields)) for event in document.get("Events", ()))
            body = orjson.dumps(document | {"Events": list(chain.from_iterable(pairs))})
    return web.Response(body=body, content_type=content_type, charset="utf-8")
