"""Runs tests on each mutant of a module, in a process that is forked with everything imported.

pytest collects the tests once. Every run of tests is a fork of that process, so a mutant costs no
more than its tests. The first run is of the module as it is: it measures how long each test takes,
and which lines of the module it runs. A mutant gets only the tests that run its lines, the fastest
first, and they stop at the first failure.
"""

from __future__ import annotations

import ast
import gc
import importlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Literal, TypeAlias

import pytest

from tests.mutation.mutants import Mutant, find_mutants

Outcome = Literal["killed", "timed out", "survived"]
MIN_LIMIT = 10.0
"""Seconds after which a test is taken to hang; ten times what it usually takes come on top."""
BASELINE_LIMIT = 180.0
_PACKAGES = ("relay", "tests")
_FORK = multiprocessing.get_context("fork")
_Trace: TypeAlias = Callable[[FrameType, str, Any], Any]


@dataclass(slots=True)
class TestCost:
    """What the run without a change measured of one test."""

    seconds: float = 0.0
    lines: set[int] = field(default_factory=set)
    """The lines of the module that the test ran."""
    passed: bool = False


class Session:
    """A plug-in of pytest that runs the collected tests on each mutant.

    ``report`` is called with each mutant and its outcome. ``wanted`` says which mutants to run.
    """

    def __init__(
        self,
        module: ModuleType,
        wanted: Callable[[Mutant], bool],
        report: Callable[[Mutant, Outcome], None],
    ) -> None:
        assert module.__file__ is not None
        self._module = module
        self._file = module.__file__
        self._tree = ast.parse(Path(self._file).read_text(encoding="utf-8"))
        self._wanted = wanted
        self._report = report
        self.mutants = find_mutants(self._tree)
        self.failed_tests: list[str] = []
        """The tests that fail without any change: then no mutant is run."""

    def pytest_collection(self, session: pytest.Session) -> None:
        """Keep pytest quiet, and let Hypothesis repeat itself and remember nothing."""
        from hypothesis import Phase, settings  # noqa: PLC0415  # pytest must import it first

        del session
        quick = settings(
            parent=settings.get_profile("relay"),
            database=None,
            derandomize=True,
            phases=(Phase.explicit, Phase.generate),
        )
        settings.register_profile("mutation", quick)
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests on the module and on its mutants, in place of running them once."""
        if session.testsfailed:
            self.failed_tests = ["the tests cannot be collected"]
            return True
        costs = self._measure(session)
        self.failed_tests = [
            item.nodeid
            for item in session.items
            if item.nodeid not in costs or not costs[item.nodeid].passed
        ]
        if self.failed_tests:
            return True
        functions = _functions_of(self._file)
        for mutant in filter(self._wanted, self.mutants):
            chosen = _choose_tests(session.items, costs, mutant)
            limits = [MIN_LIMIT + 10 * costs[item.nodeid].seconds for item in chosen]
            install = self._installer(mutant, functions)
            outcome: Outcome = "survived"
            if chosen:
                outcome = _outcome(_run(session, chosen, install, limits))
            self._report(mutant, outcome)
        return True

    def _measure(self, session: pytest.Session) -> dict[str, TestCost]:
        file = self._file

        def trace_module(cost: TestCost) -> None:
            lines = cost.lines

            def on_line(frame: FrameType, _event: str, _argument: object) -> _Trace:
                lines.add(frame.f_lineno)
                return on_line

            def on_call(frame: FrameType, _event: str, _argument: object) -> _Trace | None:
                if frame.f_code.co_filename != file:
                    return None
                lines.add(frame.f_lineno)
                return on_line

            sys.settrace(on_call)
            threading.settrace(on_call)

        limits = [BASELINE_LIMIT] * len(session.items)
        return _run(session, session.items, lambda: None, limits, trace_module) or {}

    def _installer(self, mutant: Mutant, functions: Sequence[FunctionType]) -> Callable[[], None]:
        undo = mutant.change.apply()
        code = compile(self._tree, self._file, "exec")
        mutant.change.undo(undo)

        def install() -> None:
            if mutant.kind == "body":
                _install_code(code, functions)
            else:
                mutant.change.apply()
                _install_value(mutant, self._tree, self._module, functions)

        return install


def run_mutants(
    module: str,
    tests: Sequence[str],
    wanted: Callable[[Mutant], bool],
    report: Callable[[Mutant, Outcome], None],
) -> Session:
    """Run tests (paths or node ids) on the mutants of a module, such as ``relay.signature``."""
    session = Session(importlib.import_module(module), wanted, report)
    options = ["-x", "-q", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=0"]
    code = pytest.main([*options, "--capture=no", "--no-summary", *tests], plugins=[session])
    if code != 0 and not session.failed_tests:
        session.failed_tests = [f"pytest ended with exit code {code}"]
    return session


def _choose_tests(
    items: Sequence[pytest.Item], costs: dict[str, TestCost], mutant: Mutant
) -> list[pytest.Item]:
    """Return the tests that run the lines of a mutant, the fastest first."""
    is_seen_by_all = mutant.kind != "body"
    chosen = [
        item
        for item in items
        if is_seen_by_all or not costs[item.nodeid].lines.isdisjoint(mutant.lines)
    ]
    return sorted(chosen, key=lambda item: costs[item.nodeid].seconds)


# --- runs of tests, each in a fork


def _run(
    session: pytest.Session,
    items: Sequence[pytest.Item],
    prepare: Callable[[], None],
    limits: Sequence[float],
    trace: Callable[[TestCost], None] | None = None,
) -> dict[str, TestCost] | None:
    """Run tests in a fork until the first that fails; return what each cost, None: one hangs.

    ``limits`` are the seconds that each test may take.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run_here, args=(session, items, prepare, trace, sender))
    process.start()
    sender.close()
    result: dict[str, TestCost] = {}
    try:
        for item, limit in zip(items, limits, strict=True):
            if not receiver.poll(limit):
                return None
            try:
                cost: TestCost = receiver.recv()
            except EOFError:  # the process ended without an answer, for example by a signal
                cost = TestCost()
            result[item.nodeid] = cost
            if not cost.passed:
                break
    finally:
        process.kill()
        process.join()
        receiver.close()
    return result


def _run_here(
    session: pytest.Session,
    items: Sequence[pytest.Item],
    prepare: Callable[[], None],
    trace: Callable[[TestCost], None] | None,
    sender: Connection,
) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        prepare()
    except Exception:  # noqa: BLE001  # a constant that cannot be computed is noticed by everybody
        os._exit(1)
    for item, after in zip(items, [*items[1:], None], strict=True):
        cost = TestCost()
        if trace is not None:
            trace(cost)
        began = time.monotonic()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        sys.settrace(None)
        cost.seconds = time.monotonic() - began
        cost.passed = session.testsfailed == 0
        sender.send(cost)
        if not cost.passed:
            break
    sender.close()
    os._exit(0)


def _outcome(result: dict[str, TestCost] | None) -> Outcome:
    if result is None:
        return "timed out"
    return "survived" if all(cost.passed for cost in result.values()) else "killed"


# --- a mutant takes the place of the module


def _functions_of(file: str) -> list[FunctionType]:
    """Return all functions of a file, also those in classes, properties and caches."""
    gc.unfreeze()  # `conftest` froze them, and frozen objects are not listed
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, FunctionType) and each.__code__.co_filename == file
    ]


def _install_code(module: CodeType, functions: Sequence[FunctionType]) -> None:
    """Give the functions the code of a mutant. Whoever imported a function has it then, too."""
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(module)}
    for function in functions:
        old = function.__code__
        new = codes.get((old.co_qualname, old.co_firstlineno))
        if new is not None and new != old:
            function.__code__ = new


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _install_value(
    mutant: Mutant, tree: ast.Module, module: ModuleType, functions: Sequence[FunctionType]
) -> None:
    """Change a constant wherever it was imported, or a default."""
    if mutant.kind == "constant":
        old = getattr(module, mutant.scope)
        statement = next(each for each in tree.body if each.lineno == mutant.lines.start)
        names = dict(vars(module))
        exec(compile(ast.Module([statement], []), "mutant", "exec"), names)  # noqa: S102  # ours
        for other in [*sys.modules.values()]:
            is_ours = other.__name__.partition(".")[0] in _PACKAGES
            if is_ours and vars(other).get(mutant.scope) is old:
                setattr(other, mutant.scope, names[mutant.scope])
        for function in functions:
            for name, value in _defaults(function).items():
                if value is old:
                    _set_default(function, name, names[mutant.scope])
        return
    new: Any = mutant.change.new.value
    if mutant.kind == "field":
        _set_default(getattr(module, mutant.scope).__init__, mutant.target, new)
        return
    for function in functions:
        if function.__qualname__ == mutant.scope:
            _set_default(function, mutant.target, new)


def _defaults(function: FunctionType) -> dict[str, Any]:
    values = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def _set_default(function: FunctionType, name: str, value: object) -> None:
    if function.__kwdefaults__ and name in function.__kwdefaults__:
        function.__kwdefaults__[name] = value
        return
    values = _defaults(function)
    names = list(values)[: len(function.__defaults__ or ())]
    function.__defaults__ = tuple(value if each == name else values[each] for each in names)
