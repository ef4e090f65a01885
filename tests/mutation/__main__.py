"""Runs the mutants of modules: ``python -m tests.mutation [relay/signature.py …]``.

Without a name it runs all modules. ``--only`` and a pattern choose mutants by their names. It
prints each survivor, and stores what was counted for each module for docs/proof.md, which
`make docs` writes. The exit code is 1 for a survivor, or for a line of `equivalent.toml` that names
no mutant.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from tests.mutation.mutants import Mutant
from tests.mutation.report import ModuleResult, store
from tests.mutation.runner import Outcome, run_mutants

EQUIVALENT = Path(__file__).parent / "equivalent.toml"
ROOT = Path(__file__).parent.parent.parent

_POLICY = (
    "tests/approvals/test_engine.py",
    "tests/approvals/test_holds.py",
    "tests/approvals/test_limits.py",
    "tests/approvals/test_rules.py",
    "tests/approvals/test_status.py",
    "tests/approvals/test_votes.py",
)
_GATE = (
    "tests/approvals/test_gate.py",
    "tests/approvals/test_gate_edges.py",
    "tests/approvals/test_gate_limits.py",
    "tests/approvals/test_refusal_flood.py",
    "tests/approvals/test_decision_flood.py",
)
TESTS: Mapping[str, tuple[str, ...]] = {
    "relay/approvals/transitions.py": (
        "tests/approvals/test_transitions.py",
        "tests/approvals/test_transition_edges.py",
        "tests/approvals/test_transition_laws.py",
        "tests/approvals/test_reminders.py",
        *_POLICY,
    ),
    "relay/approvals/machine_principals.py": ("tests/approvals/test_machine_principals.py",),
    "relay/approvals/engine.py": (
        "tests/approvals/test_causes.py",
        "tests/approvals/test_claims.py",
        "tests/approvals/test_decision_flood.py",
        "tests/approvals/test_engine_edges.py",
        "tests/approvals/test_first_answers.py",
        "tests/approvals/test_modes.py",
        "tests/approvals/test_refusal_flood.py",
        "tests/approvals/test_reminders.py",
        "tests/approvals/test_repeats_and_refusals.py",
        "tests/approvals/test_standing_holds.py",
        "tests/approvals/test_tampering.py",
        *_POLICY,
    ),
    "relay/approvals/gate.py": _GATE,
    "relay/fleet/hub/merge.py": (
        "tests/fleet/test_merge.py",
        "tests/fleet/test_merge_edges.py",
        "tests/fleet/test_merge_laws.py",
    ),
    "relay/signature.py": ("tests/test_signature.py",),
    "relay/events/model.py": ("tests/events/test_model.py",),
    "relay/delivery/retry.py": (
        "tests/delivery/test_retry_values.py",
        "tests/delivery/test_retry.py",
    ),
    "relay/approvals/rules.py": (
        "tests/approvals/test_rules.py",
        "tests/approvals/test_settings.py",
        "tests/approvals/test_reminders.py",
        "tests/approvals/test_machine_principals.py",
    ),
    "relay/approvals/admission.py": (
        "tests/approvals/test_admission.py",
        "tests/approvals/test_admission_answers.py",
        "tests/approvals/test_machine_principals.py",
        "tests/approvals/test_repeats_and_refusals.py",
        "tests/approvals/test_scopes.py",
        "tests/approvals/test_standing_holds.py",
        "tests/fleet/test_hub_votes.py",
        *_POLICY,
    ),
    "relay/approvals/status.py": (
        "tests/approvals/test_transitions.py",
        "tests/approvals/test_transition_edges.py",
        "tests/approvals/test_transition_laws.py",
        "tests/approvals/test_admission.py",
        "tests/approvals/test_machine_principals.py",
        "tests/approvals/test_reminders.py",
        "tests/approvals/test_status_edges.py",
        *_POLICY,
    ),
}
"""The modules, the most dangerous first, with the tests that must notice a change of them."""


def read_equivalents() -> dict[str, dict[str, str]]:
    """Return for each module the mutants that behave as it does, each with the reason."""
    found: dict[str, dict[str, str]] = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return found


def run_module(path: str, only: str = "") -> bool:
    """Run the mutants of one module whose names match ``only``; return whether it is clean."""
    equivalents = read_equivalents().get(path, {})
    outcomes: Counter[str] = Counter()

    def report(mutant: Mutant, outcome: Outcome) -> None:
        outcomes[outcome] += 1
        if outcome == "survived":
            print(f"{path}:{mutant.lines.start}: survived: {mutant.name}", flush=True)

    def is_wanted(mutant: Mutant) -> bool:
        return mutant.name not in equivalents and re.search(only, mutant.name) is not None

    module = path.removesuffix(".py").replace("/", ".")
    session = run_mutants(module, TESTS[path], is_wanted, report)
    if session.failed_tests:
        print(f"{path}: these tests fail without any change:", *session.failed_tests, sep="\n  ")
        return False
    stale = equivalents.keys() - {mutant.name for mutant in session.mutants}
    for name in sorted(stale):
        print(f"{EQUIVALENT.name}: {path} has no such mutant: {name}")
    killed = outcomes["killed"] + outcomes["timed out"]
    print(
        f"{path}: {len(session.mutants)} mutants, {killed} killed "
        f"({outcomes['timed out']} by time), {len(equivalents) - len(stale)} equivalent, "
        f"{outcomes['survived']} survived",
        flush=True,
    )
    if not only:
        result = ModuleResult(
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            mutants=len(session.mutants),
            killed=killed,
            equivalent=len(equivalents) - len(stale),
            survived=outcomes["survived"],
        )
        store(path, result)
    return not stale and not outcomes["survived"]


def main(arguments: list[str]) -> int:
    """Run the modules that are named, or all; return the exit code."""
    only = ""
    if "--only" in arguments:
        position = arguments.index("--only")
        only = arguments[position + 1]
        del arguments[position : position + 2]
    unknown = [path for path in arguments if path not in TESTS]
    if unknown:
        print(f"expected some of {', '.join(TESTS)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    results = [run_module(path, only) for path in arguments or TESTS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
