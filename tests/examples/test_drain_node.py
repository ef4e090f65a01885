"""The example program for Kubernetes drains its node before it votes, and never votes undrained.

The relay is real. A script that keeps the state of one node stands in for kubectl.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from relay.simulator import Plan, Simulator
from tests.eventually import eventually
from tests.programs import EXAMPLES
from tests.relay_in_process import document_of, relay_in_process, simulated
from tests.test_helm import needs_helm, pod_of, render

FOLDER = EXAMPLES / "drain-node"
KUBECTL = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[0]).parent
with (folder / "kubectl.log").open("a") as log:
    log.write(" ".join(sys.argv[1:3]) + "\\n")
file = folder / "node.json"
def write(node):
    unfinished = folder / "node.unfinished"
    unfinished.write_text(json.dumps(node))
    unfinished.replace(file)
node = json.loads(file.read_text())
verb, *rest = sys.argv[1:]
if verb == "get":
    print(json.dumps(node))
elif verb == "annotate":
    key, equals, value = rest[2].partition("=")
    node["metadata"]["annotations"] |= {key: value} if equals else {}
    if not equals:
        node["metadata"]["annotations"].pop(key.removesuffix("-"))
elif verb == "drain":
    node["spec"]["unschedulable"] = True
    if (folder / "stubborn").exists():
        write(node)
        sys.exit("error: a pod cannot be evicted")
elif verb == "uncordon":
    node["spec"]["unschedulable"] = False
write(node)
"""


class Node:
    """The node of the stand-in for kubectl, and the program that drains it."""

    def __init__(self, folder: Path, azure: Simulator) -> None:
        self.folder = folder
        self.azure = azure
        self.output = folder / "output"
        (folder / "kubectl").write_text(KUBECTL)
        self.set(unschedulable=False)

    def set(self, *, unschedulable: bool, **annotations: str) -> None:
        node = {"metadata": {"annotations": annotations}, "spec": {"unschedulable": unschedulable}}
        (self.folder / "node.json").write_text(json.dumps(node))

    @property
    def calls(self) -> list[str]:
        log = self.folder / "kubectl.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if not line.startswith("get ")]

    @property
    def cordoned(self) -> bool:
        return bool(json.loads((self.folder / "node.json").read_text())["spec"]["unschedulable"])

    @asynccontextmanager
    async def program(self) -> AsyncIterator[None]:
        """Run the program until the end of the block."""
        with self.output.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(FOLDER / "drain_node.py"),
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    "NODE": "worker-1",
                    "RELAY_SOCKET": str(self.folder / "relay.sock"),
                    "IMDS": self.azure.url.removeprefix("http://"),
                    "KUBECTL": f"{sys.executable} {self.folder / 'kubectl'}",
                    "EVERY": "0.1",
                },
            )
        try:
            yield
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await process.wait() == 0, self.output.read_text()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node whose VM is vm-0, with a plain relay: the program calls an agent in the same way."""
    async with simulated("vm-0", "vm-1") as azure:
        rule = {"name": "drained", "approve": {"votes": 1, "from": ["group:local"]}}
        user = f"local:{getpass.getuser()}"
        document = document_of(
            tmp_path,
            azure,
            approvals={"rules": [rule], "groups": {"local": [user]}, "tell_first": "0s"},
            api={"listen": "127.0.0.1:0", "socket": str(tmp_path / "relay.sock")},
        )
        async with relay_in_process(azure, document):
            yield Node(tmp_path, azure)


async def test_the_node_is_drained_before_the_vote_and_comes_back_after_the_event(
    node: Node,
) -> None:
    async with node.program():
        event = node.azure.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
        await node.azure.wait_until_approved(event, within=60)
        assert node.calls == ["annotate node", "drain worker-1"]
        assert node.cordoned
        await node.azure.wait_until_started(event, within=60)
        node.azure.end(event)
        await eventually(lambda: len(node.calls) == 4)
        assert not node.cordoned
    assert node.calls[2:] == ["uncordon worker-1", "annotate node"]
    assert "202 granted" in node.output.read_text()


async def test_without_an_empty_node_there_is_no_vote(node: Node) -> None:
    (node.folder / "stubborn").touch()
    async with node.program():
        event = node.azure.schedule(Plan(type="Redeploy", resources=("vm-0",), lasts=None))
        await eventually(lambda: node.calls.count("drain worker-1") >= 2)
        assert not node.azure.event(event).approved
        assert "202" not in node.output.read_text()
        (node.folder / "stubborn").unlink()
        await node.azure.wait_until_approved(event, within=60)


async def test_events_of_other_vms_and_freezes_leave_the_node_alone(node: Node) -> None:
    async with node.program():
        node.azure.schedule(Plan(type="Reboot", resources=("vm-1",), lasts=None))
        node.azure.schedule(Plan(type="Freeze", resources=("vm-0",), lasts=None))
        mine = node.azure.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
        await node.azure.wait_until_approved(mine, within=60)
        assert node.calls == ["annotate node", "drain worker-1"]


async def test_a_node_that_a_person_has_cordoned_stays_so(node: Node) -> None:
    node.set(unschedulable=True)
    async with node.program():
        event = node.azure.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
        await node.azure.wait_until_approved(event, within=60)
        await node.azure.wait_until_started(event, within=60)
        node.azure.end(event)
        reads = node.folder / "kubectl.log"
        before = len(reads.read_text().splitlines())
        await eventually(lambda: len(reads.read_text().splitlines()) > before)
    assert node.calls == ["drain worker-1"]
    assert node.cordoned


async def test_a_node_that_was_cordoned_before_a_restart_comes_back(node: Node) -> None:
    node.set(unschedulable=True, **{"imds-relay/cordoned": "an event that is over"})
    async with node.program():
        await eventually(lambda: len(node.calls) == 2)
        assert not node.cordoned
    assert node.calls == ["uncordon worker-1", "annotate node"]


# --- the manifests


@needs_helm
def test_only_the_program_gets_a_token() -> None:
    values = YAML(typ="safe", pure=True).load(FOLDER / "values.yaml")
    (container,) = values["extraContainers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["drain-node-token"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert mounts["socket"] == "/run/imds-relay"
    pod = pod_of(render("agent", f"--values={FOLDER}/values.yaml"))
    relay, program = pod["containers"]
    assert program == container
    assert "drain-node-token" not in {mount["name"] for mount in relay["volumeMounts"]}
    assert {"socket", *mounts} <= {volume["name"] for volume in pod["volumes"]}
