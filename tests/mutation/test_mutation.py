"""Mutation testing itself: what it changes, what it notices, and what it may leave out."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import ROOT, TESTS, main, read_equivalents
from tests.mutation.mutants import find_mutants

RUN_SAMPLE = """
import json
from tests.mutation.runner import run_mutants
outcomes = {}
session = run_mutants(
    "tests.mutation.sample",
    ["tests/mutation/sample_checks.py"],
    lambda mutant: True,
    lambda mutant, outcome: outcomes.update({mutant.name: outcome}),
)
print(json.dumps([session.failed_tests, outcomes]))
"""


def names(source: str) -> list[str]:
    """Return the names of the mutants of a source."""
    return [mutant.name for mutant in find_mutants(ast.parse(source))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["f: a < b → a <= b", "f: a < b → a >= b"]),
        ("x and not y", ["f: and → or after x", "f: not y → y", "f: x → True"]),
        ("g(1, key=n)", ["f: g(1, key=n) → g(2, key=n)", "f: key=n → nothing"]),
        ("min(a)", ["f: min → max"]),
        ("[n for n in a if n]", ["f: n → True", "f: n → False"]),
    ],
)
def test_expressions_are_changed(source: str, expected: list[str]) -> None:
    assert set(expected) <= set(names(f"def f():\n    return {source}"))


def test_docstrings_annotations_and_texts_of_errors_are_not_changed() -> None:
    source = 'def f(a: "x") -> "y":\n    """Text."""\n    raise ValueError("text")'
    assert names(source) == ["f: raise ValueError('text') → pass"]


def test_a_private_constant_is_changed_only_if_a_function_reads_it() -> None:
    source = "_ONE = 1\n_TWO = 2\nTHREE = 3\nclass C:\n    x: g(_ONE)\ndef f():\n    return _TWO"
    assert names(source)[:2] == ["_TWO: _TWO = 2 → _TWO = 3", "THREE: THREE = 3 → THREE = 4"]


def test_the_same_change_twice_in_a_function_has_two_names() -> None:
    source = "def f(a):\n    g(a[0])\n    h(a[0])"
    assert [name for name in names(source) if "a[0]" in name and "a[1]" in name] == [
        "f: a[0] → a[1]",
        "f: a[0] → a[1] (2)",
    ]


def test_every_mutant_leaves_the_tree_as_it_was() -> None:
    source = Path(ROOT / "tests/mutation/sample.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    for mutant in find_mutants(tree):
        undo = mutant.change.apply()
        assert ast.dump(tree) != ast.dump(ast.parse(source)), mutant.name
        compile(tree, "sample.py", "exec")
        mutant.change.undo(undo)
        assert ast.dump(tree) == ast.dump(ast.parse(source)), mutant.name


def test_only_changes_that_no_test_notices_survive() -> None:
    """Changes of functions, properties, defaults, fields and constants take effect."""
    command = [sys.executable, "-c", RUN_SAMPLE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failed, outcomes = json.loads(done.stdout.splitlines()[-1])
    assert failed == []
    survivors = {name for name, outcome in outcomes.items() if outcome != "killed"}
    assert survivors == {
        "LIMIT: LIMIT = 10 → LIMIT = 11",
        "Order.is_large: self.amount >= LIMIT → self.amount > LIMIT",
    }
    assert "Order: urgent: bool = False → urgent: bool = True" in outcomes
    assert "describe: unit='boxes' → unit='other boxes'" in outcomes


def test_every_equivalent_mutant_exists_and_has_a_reason() -> None:
    for path, reasons in read_equivalents().items():
        assert path in TESTS
        existing = names((ROOT / path).read_text(encoding="utf-8"))
        assert reasons.keys() - set(existing) == set(), path
        assert all(len(reason.split()) > 2 for reason in reasons.values())


def test_every_module_has_tests_that_exist() -> None:
    for path, tests in TESTS.items():
        assert [each for each in (path, *tests) if not (ROOT / each).is_file()] == []


def test_an_unknown_module_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relay/app.py"]) == 2
    assert "got relay/app.py" in capsys.readouterr().err
