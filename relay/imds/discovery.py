"""Which VM this is: its identity from instance metadata, the scope and names that follow from it, and its boot.

Source: Microsoft, "Azure Instance Metadata Service", section on the instance category.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from relay.clock import Clock
from relay.errors import DocumentError, SourceError, SourceUnavailable
from relay.imds.client import ImdsClient
from relay.imds.rate_limit import retry_delay

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_INTERVAL = 1.0
"""Seconds to the first retry."""
_NO_METADATA = 10.0
"""Seconds of 404 after which there is no instance metadata here, as on a plain simulator."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Instance:
    """This VM as instance metadata describes it. What is blank or left out is "", but ``vm_id`` and ``name`` never are."""

    vm_id: str
    name: str
    computer_name: str
    subscription_id: str
    resource_group: str
    scale_set: str
    placement_group: str


def _text(value: object) -> object:
    return "" if value is None else value


_Text = Annotated[str, BeforeValidator(_text)]


class _Wire(BaseModel):
    model_config = ConfigDict(
        extra="ignore",
        hide_input_in_errors=True,
        str_strip_whitespace=True,
        alias_generator=to_camel,
    )


class _WireProfile(_Wire):
    computer_name: _Text = ""


class _WireCompute(_Wire):
    vm_id: str = Field(min_length=1)
    name: _Text = ""
    subscription_id: _Text = ""
    resource_group_name: _Text = ""
    vm_scale_set_name: _Text = ""
    placement_group_id: _Text = ""
    os_profile: _WireProfile | None = None


class _WireInstance(_Wire):
    compute: _WireCompute


def parse_instance(body: bytes) -> Instance:
    """Read the answer of instance metadata. Raises DocumentError where it has no ``compute.vmId`` or is not JSON."""
    try:
        compute = _WireInstance.model_validate_json(body).compute
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise DocumentError(
            f"expected instance metadata, {place}: {first['msg']}", status=200
        ) from error
    computer = compute.os_profile.computer_name if compute.os_profile else ""
    return Instance(
        vm_id=compute.vm_id,
        name=compute.name or computer or compute.vm_id,
        computer_name=computer,
        subscription_id=compute.subscription_id,
        resource_group=compute.resource_group_name,
        scale_set=compute.vm_scale_set_name,
        placement_group=compute.placement_group_id,
    )


def derive_scope(instance: Instance) -> str:
    """The name of the group of VMs that reads the same document (``scope: auto``, see docs/configuration.md#the-scope)."""
    if instance.scale_set:
        parts = (
            instance.subscription_id,
            instance.resource_group,
            instance.scale_set,
            instance.placement_group,
        )
        identity = "/".join(parts)
    else:
        identity = instance.vm_id
    name = re.sub(r"[^a-z0-9-]", "-", (instance.scale_set or instance.name).lower())[:71]
    return f"{name}-{hashlib.sha256(identity.lower().encode()).hexdigest()[:8]}"


def derive_relay_name(instance: Instance) -> str:
    """This relay's own name: that of the VM (``relay: auto``)."""
    return instance.name


def resource_names(instance: Instance, hostname: str) -> frozenset[str]:
    """Every name, in lower case, by which ``Resources`` may mean this VM (docs/protocol.md#names-of-resources).

    VM name, computer name and host name; ``set_18`` where the computer is called ``set00000i`` and the other way round; and
    each with the ``_`` that api-version 2017-03-01 puts in front.
    """
    plain = {instance.name, instance.computer_name, hostname, hostname.partition(".")[0]}
    if instance.scale_set:
        plain |= {other for name in plain for other in _scale_set_names(instance.scale_set, name)}
    return frozenset(form for name in plain if name for form in (name.lower(), f"_{name.lower()}"))


def _scale_set_names(scale_set: str, name: str) -> Iterable[str]:
    # A uniform scale set counts its instances in decimal in VM names, in six digits of base 36 in computer names.
    if number := re.fullmatch(r".+_(\d{1,9})", name, re.ASCII):
        yield f"{scale_set}{_base36(int(number[1])):0>6}"
    elif digits := re.fullmatch(r"(.+?)([0-9a-z]{6})", name, re.ASCII | re.IGNORECASE):
        yield f"{scale_set}_{int(digits[2], 36)}"
        yield f"{digits[1]}_{int(digits[2], 36)}"


def _base36(number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits


def names_this_vm(resources: Iterable[str], names: frozenset[str]) -> bool:
    """Whether ``Resources`` holds one of this VM's names. Where the names are not known, ask no further: it may be this VM."""
    return any(resource.lower() in names for resource in resources)


def read_boot_id() -> str | None:
    """Names the running boot of this machine; None where the system has no such name, and a reboot cannot be told.

    Linux only: the counters that Windows keeps since its start repeat from boot to boot and across hibernation.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


async def discover(
    client: ImdsClient, clock: Clock, *, needed: bool, chance: Callable[[], float] = random.random
) -> Instance | None:
    """Ask instance metadata until it answers, for ever.

    ``needed``: scope or relay follow from it. Where they are named by hand, None comes back after ten seconds of nothing
    but 404: there is no vmId to compare. ``chance`` gives the jitter, 0 to 1.
    """
    failures = 0
    said: str | None = None
    absent_since: float | None = None
    while True:
        try:
            instance = parse_instance(await client.read_instance())
        except SourceError as error:
            failure = error
        else:
            if said is not None:
                _log.info(
                    "instance metadata answers again: this is VM %s, vmId %s",
                    instance.name,
                    instance.vm_id,
                )
            return instance
        failures += 1
        now = clock.monotonic()
        absent_since = (
            (now if absent_since is None else absent_since) if failure.status == 404 else None
        )
        if not needed and absent_since is not None and now - absent_since >= _NO_METADATA:
            _log.warning(
                "no instance metadata (404 for %.0fs): there is no vmId to compare the state file with",
                now - absent_since,
            )
            return None
        if failure.reason != said:
            said = failure.reason
            _log.warning("waiting for instance metadata, which names this VM: %s", said)
        asked = failure.retry_after if isinstance(failure, SourceUnavailable) else None
        await clock.sleep(retry_delay(failures, asked, _INTERVAL, chance()))
