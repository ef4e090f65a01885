"""Plug-ins: installed packages that add sinks. A broken one is named, and stops nobody else."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.cli.command import ROOT, CommandResult, run_process

GOOD = """
from contextlib import asynccontextmanager
from typing import Literal
from relay.sinks import SinkSettings

class Settings(SinkSettings):
    kind: Literal["KIND"]

@asynccontextmanager
async def connect(settings, clock):
    yield None
"""


def install(site: Path, package: str, kind: str, code: str | None, group: str = "sinks") -> None:
    """Make what an installed package has: metadata with an entry point, and its module."""
    module = package.replace("-", "_")
    metadata = site / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[relay.{group}]\n{kind} = {module}\n")
    if code is not None:
        (site / f"{module}.py").write_text(code.replace("KIND", kind))


def check(site: Path, *kinds: str) -> CommandResult:
    """Check a configuration that has a sink of each kind."""
    file = site / "relay.yaml"
    sinks = "\n".join(f"  - {{kind: {kind}, name: {kind}}}" for kind in kinds)
    file.write_text(
        "approvals: {rules: [{name: all, approve: automatic}]}\n"
        f"api: {{socket: null}}\nsinks:\n{sinks or '  []'}\n"
    )
    path = os.pathsep.join([str(site), str(ROOT)])
    return run_process("check", "-c", str(file), PYTHONPATH=path)


BROKEN = {
    "absent": (None, "ModuleNotFoundError: No module named 'imds_absent'"),
    "raises": ("raise OSError('no pager\\nhere')", "OSError: no pager"),
    "exits": ("raise SystemExit('bye')", "SystemExit: bye"),
    "empty": ("", "expected a class Settings that is a subclass of SinkSettings"),
    "plain": (
        GOOD.replace("class Settings(SinkSettings)", "class Settings"),
        "expected a class Settings that is a subclass of SinkSettings",
    ),
    "unkind": (
        GOOD.replace('kind: Literal["KIND"]', "url: str"),
        'expected kind: Literal["unkind"] in its Settings',
    ),
    "undefined": (GOOD.replace("kind:", 'other: "Nowhere"\n    kind:'), "Nowhere"),
    "alone": (GOOD.replace("def connect", "def other"), "expected a function connect"),
}
"""The code of plug-ins, None for none, and what is said of them."""


def test_a_broken_plug_in_is_named_and_stops_only_those_who_use_it(tmp_path: Path) -> None:
    install(tmp_path, "imds-good", "good", GOOD)
    for kind, (code, _) in BROKEN.items():
        install(tmp_path, f"imds-{kind}", kind, code)
    unused = check(tmp_path, "good")
    used = check(tmp_path, "good", *BROKEN)
    assert (unused.code, used.code, used.out) == (0, 2, "")
    warnings, errors = unused.err.splitlines(), used.err.splitlines()
    assert len(warnings) == len(errors) == len(BROKEN)
    for line, (kind, (_, reason)) in enumerate(BROKEN.items(), start=5):
        named = f"plug-in {kind} of package imds-{kind} 1.0 (module imds_{kind}) cannot be used: "
        (warning,) = [each for each in warnings if each.startswith(f"warning: {named}")]
        (error,) = [each for each in errors if named in each]
        assert reason in warning
        assert reason in error
        assert f"relay.yaml:{line}: sinks[{line - 4}].kind: expected one of 'rabbitmq'" in error


def test_a_plug_in_names_its_keys_as_it_likes(tmp_path: Path) -> None:
    keys = 'targets: tuple[str, ...] = ("a",)\n    receiver_url: str = "b"\n    exchange: int = 1'
    install(tmp_path, "imds-pager", "pager", GOOD.replace("kind:", f"{keys}\n    kind:"))
    result = check(tmp_path, "pager")
    assert (result.code, result.err.count("bug")) == (0, 0), result.err
    assert "pager" in result.out


def test_no_plug_in_takes_the_place_of_another_member(tmp_path: Path) -> None:
    code = GOOD.replace("relay.sinks import SinkSettings", "relay.chat import ChatSettings")
    code = code.replace("(SinkSettings)", "(ChatSettings)").replace(
        "    kind:",
        "    principals: ClassVar = PrincipalForm('client', '<name>', r'.+')\n    kind:",
    )
    code = code.replace("import Literal", "import ClassVar, Literal")
    code = f"from relay.approvals.principals import PrincipalForm\n{code}"
    install(tmp_path, "imds-board", "board", code, "chat.platforms")
    thief = code.replace("'client', '<name>'", "'slack', '<name>'")
    install(tmp_path, "imds-thief", "thief", thief, "chat.platforms")
    hook = code.replace("'client', '<name>'", "'hook', '<name>'")
    install(tmp_path, "imds-hook", "rabbitmq", hook, "chat.platforms")
    for package, kind in (
        ("webhook", "webhook"),
        ("slack", "slack"),
        ("1", "pager"),
        ("2", "pager"),
    ):
        install(tmp_path, f"imds-{package}", kind, GOOD)
    unused = check(tmp_path)
    used = check(tmp_path, "pager")
    assert (unused.code, used.code, len(used.err.splitlines())) == (0, 2, 1)
    for kind, reason in (
        ("webhook", "the relay has a member of its own with this name"),
        ("rabbitmq", "the relay has a member of its own with this name"),
        ("slack", "the relay has a member of its own with this name"),
        ("pager", "several packages have a plug-in with this name: package imds-1 1.0"),
        ("board", "prefix client"),
        ("thief", "expected one form of principals with the prefix slack:"),
    ):
        assert re.search(f"warning: plug-in {kind} of package .*{reason}", unused.err), kind
    assert "several packages have a plug-in with this name: package imds-1 1.0" in used.err
