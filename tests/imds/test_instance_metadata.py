"""Which VM this is: identity, scope, names, and the wait for all of them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config import AGENT_EXAMPLE
from relay.errors import DocumentError
from relay.imds import SourceSettings, instance_metadata
from relay.imds.client import ImdsClient
from relay.imds.instance_metadata import (
    Instance,
    derive_scope,
    parse_instance,
    read_boot_id,
    resource_names,
    wait_for_instance_metadata,
)
from relay.ingest import names_this_vm
from tests.clocks import ManualClock
from tests.eventually import eventually
from tests.imds.scripted_server import Answer, ScriptedServer, answers_in_order, run_server

VM = Instance(
    vm_id="02AAB8A4-74EF-476E-8182-F6D2BA4166A6",
    name="Web.Server_01",
    computer_name="webserver01",
    subscription_id="SUB-1",
    resource_group="My_Group",
    scale_set="",
    placement_group="",
)
IN_SET = Instance(
    vm_id="VMID",
    name="Prod_VMSS_18",
    computer_name="prodvmss00000i",
    subscription_id="Sub-1",
    resource_group="Group",
    scale_set="Prod_VMSS",
    placement_group="PG-1",
)
COMPUTE = {
    "vmId": VM.vm_id,
    "name": VM.name,
    "subscriptionId": VM.subscription_id,
    "resourceGroupName": VM.resource_group,
    "vmScaleSetName": "",
    "placementGroupId": "",
    "osProfile": {
        "adminUsername": "admin",
        "computerName": VM.computer_name,
        "disablePasswordAuthentication": "true",
    },
    "tagsList": [],
}


def body(**changes: Any) -> bytes:
    return orjson.dumps({"compute": COMPUTE | changes, "network": {"interface": []}})


# --- reading


def test_instance_metadata_says_which_vm_this_is() -> None:
    assert parse_instance(body()) == VM


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        ({"vmId": "ID"}, "ID"),
        ({"vmId": "ID", "name": None, "osProfile": None, "vmScaleSetName": None}, "ID"),
        ({"vmId": "ID", "name": " ", "osProfile": {"computerName": "host"}}, "host"),
        ({"vmId": "ID", "osProfile": {"computerName": None}, "future": {"x": 1}}, "ID"),
    ],
)
def test_only_the_vm_id_is_required(compute: dict[str, Any], name: str) -> None:
    instance = parse_instance(orjson.dumps({"compute": compute}))
    assert (instance.vm_id, instance.name) == ("ID", name)


def test_what_has_no_vm_id_is_no_instance_metadata() -> None:
    no_object = (b"", b"{", b"[]", b"null", b"\xff")
    no_id = (b"{}", b'{"compute":[]}', b'{"compute":{}}', b'{"compute":{"vmId":""}}')
    for wrong in (*no_object, *no_id, b'{"compute":{"vmId":7}}'):
        with pytest.raises(DocumentError, match="expected instance metadata"):
            parse_instance(wrong)


# --- scope and names


def test_vms_of_an_availability_set_are_alone_and_the_example_of_an_agent_says_so() -> None:
    """Of what instance metadata says, they share nothing but their resource group."""
    assert derive_scope(VM) != derive_scope(dataclasses.replace(VM, vm_id="2"))
    comment = AGENT_EXAMPLE.read_text(encoding="utf-8").partition("\nrelay:")[0]
    assert "no availability set: give all VMs of one the same name" in comment


def test_the_scope_of_a_scale_set_is_its_name_and_a_digest_of_what_tells_it_from_others() -> None:
    digest = hashlib.sha256(b"sub-1/group/prod_vmss/pg-1").hexdigest()[:8]
    assert derive_scope(IN_SET) == f"prod-vmss-{digest}"


def test_all_vms_of_a_placement_group_have_one_scope_and_no_other_group_has_it() -> None:
    other = dataclasses.replace(IN_SET, vm_id="OTHER", name="Prod_VMSS_19", computer_name="x")
    assert derive_scope(other) == derive_scope(IN_SET)
    for field in ("subscription_id", "resource_group", "scale_set", "placement_group"):
        assert derive_scope(dataclasses.replace(IN_SET, **{field: "else"})) != derive_scope(IN_SET)


@given(st.builds(Instance, **{field.name: st.text() for field in dataclasses.fields(Instance)}))
def test_a_scope_is_always_what_is_documented_and_knows_no_case(instance: Instance) -> None:
    scope = derive_scope(instance)
    assert re.fullmatch(r"[a-z0-9-]{1,80}", scope)
    ascii_only = all(value.isascii() for value in dataclasses.astuple(instance))
    fields = dataclasses.asdict(instance).items()
    upper = Instance(**{name: value.upper() for name, value in fields})
    assert not ascii_only or derive_scope(upper) == scope


def test_a_member_of_a_uniform_scale_set_is_meant_in_decimal_and_in_base_36() -> None:
    """`set_18` in Resources is host `set00000i` (docs/protocol.md#names-of-resources)."""
    names = resource_names(IN_SET, "prodvmss00000i")
    meant = ("Prod_VMSS_18", "prod_vmss_18", "_Prod_VMSS_18", "prodvmss_18", "prodvmss00000i")
    for resource in (*meant, "prod_vmss00000I"):
        assert names_this_vm([resource], names), resource
    neighbours = ("Prod_VMSS_1", "Prod_VMSS_180", "prodvmss00000j", "prodvmss000018")
    for resource in (*neighbours, "", "_", "Prod_VMSS", "18"):
        assert not names_this_vm([resource], names), resource


# --- boot


@pytest.mark.skipif(
    not Path("/proc/sys/kernel/random/boot_id").exists(), reason="this system has no boot id"
)
def test_the_boot_id_stays_the_same_while_the_machine_runs() -> None:
    first = read_boot_id()
    assert first is not None
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", first)
    assert read_boot_id() == first


@pytest.mark.parametrize("text", [None, b"", b"\n", b"\xff\xfe"])
def test_a_system_without_a_boot_id_has_none(
    text: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "boot_id"
    if text is not None:
        path.write_bytes(text)
    monkeypatch.setattr(instance_metadata, "BOOT_ID_FILE", path)
    assert read_boot_id() is None


# --- waiting for it


async def discover_from(server: ScriptedServer, *, required: bool) -> Instance | None:
    clock = server.clock
    assert isinstance(clock, ManualClock)
    async with ImdsClient(SourceSettings(url=server.url), clock) as client, clock.ticking(0.1):
        return await wait_for_instance_metadata(
            client, clock, required=required, jitter=lambda: 0.5
        )


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(Answer(b"", 404), id="404"),
        pytest.param(Answer(b"", 410), id="410"),
        pytest.param(Answer(b"", 400), id="400"),
        pytest.param(Answer(b"", 500), id="500"),
        pytest.param(Answer(raw=b"", then="reset"), id="reset"),
        pytest.param(Answer(b""), id="empty"),
        pytest.param(Answer(b'{"compute":{}}'), id="no vmId"),
    ],
)
@pytest.mark.parametrize("required", [True, False])
async def test_every_failure_is_waited_out(failure: Answer, required: bool) -> None:
    answers = answers_in_order(failure, failure, Answer(body()))
    async with run_server(answers, ManualClock()) as server:
        assert await discover_from(server, required=required) == VM
    assert len(server.requests) == 3


async def test_where_it_is_required_404_is_waited_out_for_ever() -> None:
    async with run_server(Answer(b"", 404), ManualClock()) as server:
        wait = asyncio.create_task(discover_from(server, required=True))
        await eventually(
            lambda: bool(server.requests) and server.requests[-1].at - server.requests[0].at >= 40
        )
        server.answer = Answer(body())
        assert await wait == VM


async def test_ten_seconds_of_404_mean_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async with run_server(Answer(b"", 404), ManualClock()) as server:
        assert await discover_from(server, required=False) is None
        span = server.requests[-1].at - server.requests[0].at
    assert 10.0 <= span < 20.0
    assert "no vmId to compare" in caplog.text
