"""Finds out which VM this is: its identity, its scope and names, and its running boot.

Source: the instance category of the IMDS page (docs/protocol.md#imds-scheduled-events).
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AliasPath,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    with_config,
)

from relay.clock import Clock
from relay.errors import DocumentError, SourceError
from relay.events.model import add_underscore_prefixed_names, other_instance_names
from relay.imds.calls import retry_delay
from relay.imds.client import ImdsClient
from relay.logs import LogOnce
from relay.settings import first_error_path_and_message

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
RETRY_INTERVAL = 1.0
"""Seconds to the first retry."""
NOT_FOUND_TIMEOUT = 10.0
"""Seconds of 404 after which there is no instance metadata, for example on a simulator."""

_log = logging.getLogger(__name__)


_Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


def _at(*path: str, **options: Any) -> Any:
    return Field(**options, validation_alias=AliasPath("compute", *path))


@with_config(ConfigDict(extra="ignore", hide_input_in_errors=True, str_strip_whitespace=True))
@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """This VM. A field that is blank or left out is "". ``vm_id`` and ``name`` are never empty."""

    vm_id: Annotated[str, _at("vmId", min_length=1)]
    name: Annotated[_Text, _at("name")] = ""
    computer_name: Annotated[_Text, _at("osProfile", "computerName")] = ""
    subscription_id: Annotated[_Text, _at("subscriptionId")] = ""
    resource_group: Annotated[_Text, _at("resourceGroupName")] = ""
    scale_set: Annotated[_Text, _at("vmScaleSetName")] = ""
    placement_group: Annotated[_Text, _at("placementGroupId")] = ""
    zone: Annotated[_Text, _at("zone")] = ""


_INSTANCE = TypeAdapter(Instance)


def parse_instance(body: bytes) -> Instance:
    """Read the body. Raises DocumentError if it is not JSON or has no ``compute.vmId``."""
    try:
        instance = _INSTANCE.validate_json(body)
    except ValidationError as error:
        path, problem = first_error_path_and_message(error)
        raise DocumentError(
            f"expected instance metadata, {path or 'document'}: {problem}", status=200
        ) from error
    return replace(instance, name=instance.name or instance.computer_name or instance.vm_id)


def derive_scope(instance: Instance) -> str:
    """Return the group of VMs with the same document: docs/configuration.md#the-scope."""
    identity = instance.vm_id
    if instance.scale_set:
        group = f"{instance.subscription_id}/{instance.resource_group}"
        identity = f"{group}/{instance.scale_set}/{instance.placement_group}"
    digest = hashlib.sha256(identity.lower().encode()).hexdigest()[:8]
    name = re.sub(r"[^a-z0-9-]", "-", (instance.scale_set or instance.name).lower())[:71]
    return f"{name}-{digest}"


def resource_names(instance: Instance, hostname: str) -> frozenset[str]:
    """Return every name, in lower case, by which ``Resources`` may refer to this VM.

    These are the VM name, the computer name and the host name; in a scale set also each name in the
    other notation (``set_18`` and ``set00000i``); and each of them with the prefix ``_``. See
    docs/protocol.md#names-of-resources.
    """
    names = {instance.name, instance.computer_name, hostname, hostname.partition(".")[0]}
    if instance.scale_set:
        for name in tuple(names):
            names.update(other_instance_names(name, instance.scale_set))
    return add_underscore_prefixed_names(frozenset(name.lower() for name in names if name))


def read_boot_id() -> str | None:
    """Return the id of the running boot; None but on Linux: boot counters of Windows repeat."""
    try:
        return BOOT_ID_FILE.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


async def wait_for_instance_metadata(
    client: ImdsClient, clock: Clock, *, required: bool, jitter: Callable[[], float] = random.random
) -> Instance | None:
    """Read instance metadata; try again until it answers.

    ``required``: the scope or the name of the relay depends on it. Otherwise this returns None
    after `NOT_FOUND_TIMEOUT` seconds of nothing but 404, or 400 outside a virtual network.
    ``jitter`` returns a number from 0 to 1.
    """
    failures = 0
    state_log = LogOnce(_log)
    not_found_since: float | None = None
    while True:
        try:
            instance = parse_instance(await client.read_instance_metadata_body())
        except SourceError as error:
            failure = error
        else:
            if failures:
                text = "instance metadata answers: this is VM %s, vmId %s"
                _log.info(text, instance.name, instance.vm_id)
            return instance
        failures += 1
        now = clock.monotonic()
        # Outside a virtual network Azure's host may answer, which does not know the path.
        is_outside = client.is_outside_virtual_network
        if failure.status == 404 or (failure.status == 400 and is_outside):
            not_found_since = now if not_found_since is None else not_found_since
        else:
            not_found_since = None
        seconds = now - not_found_since if not_found_since is not None else 0.0
        if not required and seconds >= NOT_FOUND_TIMEOUT:
            _log.warning(
                "no instance metadata (%s for %.0fs): "
                "there is no vmId to compare with the state file",
                failure.status,
                seconds,
            )
            return None
        state_log.log_if_changed(
            logging.WARNING,
            "waiting for instance metadata, which names this VM: %s",
            failure.reason,
        )
        await clock.sleep(retry_delay(failures, failure.retry_after, RETRY_INTERVAL, jitter()))
