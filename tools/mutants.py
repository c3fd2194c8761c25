"""Changes the library in small ways, one at a time, and lists the changes that no test notices.

    python tools/mutants.py src/overspill/planner.py src/overspill/schedule.py:30-60 --sample 100

Works on a copy of the tree. Each mutant is run against those of its file's tests that execute its lines, fastest
first, in a process that is forked from a pytest session which has imported and collected everything already; there the
function's code is put in the place of the original's. So a mutant takes as long as the tests that it is noticed by.
"""

import argparse
import ast
import gc
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import TextIO

import coverage
import pytest
from mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
TESTS: dict[str, tuple[str, ...]] = {
    "planner.py": ("test_planner.py", "test_plan.py", "test_windows.py"),
    "schedule.py": ("training/test_schedule.py", "test_run.py"),
    "residency.py": (
        "test_residency.py",
        "training/test_schedule.py",
        "training/test_races.py",
        "training/test_offload_training.py::test_a_block_comes_once_for_its_forward_and_once_for_its_backward",
        "training/test_offload_training.py::test_a_backward_finds_its_units_fetched_ahead",
        "training/test_offload_training.py::test_a_pass_without_gradients_leaves_the_learned_order_alone",
        "test_run.py",
        "test_windows.py",
        "test_mapping.py",
        "test_contract.py",
        "test_offload.py::test_the_window_is_given_back_after_each_call_and_each_backward",
        "test_faults.py::test_files_that_are_gone_before_their_first_use_are_named_and_may_come_back",
        "faults/test_random_sequences.py",
    ),
    "steps.py": ("test_residency.py", "training/test_schedule.py"),
    "streamed.py": ("test_contract.py", "test_residency.py", "test_compile.py", "test_mapping.py", "test_run.py"),
    "slab.py": ("test_slab.py", "test_residency.py", "test_windows.py", "test_run.py"),
    "mapping.py": ("test_mapping.py", "test_contract.py"),
    "checkpoint/lease.py": ("test_mapping.py",),
    "checkpoint/safetensors_header.py": ("checkpoint",),
    "checkpoint/index.py": ("checkpoint", "security/test_paths.py", "test_reader.py"),
    "checkpoint/reader.py": ("test_reader.py", "security/test_paths.py"),
    "checkpoint/writer.py": ("checkpoint/test_writer.py", "checkpoint/test_publishing.py"),
    "checkpoint/publishing.py": (
        "checkpoint/test_publishing.py",
        "security/test_folders.py",
        "test_save.py::test_an_interrupt_at_any_step",
    ),
    "checkpoint/rearranging.py": ("checkpoint/test_rearranging.py",),
    "checkpoint/conversion.py": (
        "checkpoint/test_conversion.py",
        "test_conversions.py::test_the_models_own_form",
        "test_conversions.py::test_what_is_fused_or_cut_is_read_where_it_lies",
        "test_conversions.py::test_what_lies_in_another_order_is_converted_once",
        "test_conversions.py::test_transposed_experts_of_old_checkpoints",
        "test_conversions.py::test_a_cast_on_the_way",
        "test_conversions.py::test_one_form_over_the_other_in_place",
    ),
}
"""The tests, of those in tests/, that a file of src/overspill answers to: they are about it, and take seconds."""

MEMORY = 64 * 2**30  # of address space: a mutant that goes on for ever must not take the machine with it


@dataclass
class Baseline:
    """The tests of a file as it is: how long each takes, and which lines it executes."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests_of_line: dict[int, list[str]] = field(default_factory=dict)

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Fastest first. All of them for lines that none is seen to execute: a process of its own may do so."""
        lines = range(mutant.line, mutant.last_line + 1)
        seen = {test for line in lines for test in self.tests_of_line.get(line, ()) if test}
        return sorted(seen or self.seconds, key=lambda test: self.seconds[test])


class Mutating:
    """A pytest plugin that runs the collected tests once for each mutant, not once."""

    def __init__(self, source: Path, mutants: list[Mutant], survivors: TextIO) -> None:
        self.survived = 0
        self._source, self._mutants, self._survivors = source, mutants, survivors
        self._functions: dict[str, list[FunctionType]] = defaultdict(list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename == str(self._source):
                self._functions[thing.__qualname__].append(thing)
        baseline = self._measure(session)
        items = {item.nodeid: item for item in session.items}
        for mutant in self._mutants:
            tests = baseline.tests_for(mutant)
            if self._survives(mutant, session, [items[test] for test in tests], baseline.seconds):
                self.survived += 1
                self._survivors.write(f"{self._source.name}:{mutant.line}: {mutant}\n")
        return True

    def _measure(self, session: pytest.Session) -> Baseline:
        noted = self._source.with_suffix(".baseline")
        noted.write_text("the run of all tests")

        def work() -> bool:
            watch = coverage.Coverage(data_file=None, include=[str(self._source)], config_file=False)
            watch.start()
            seconds = {}
            for item in session.items:
                start = time.monotonic()
                watch.switch_context(item.nodeid)
                run([item], session)
                seconds[item.nodeid] = time.monotonic() - start
                if session.testsfailed:
                    noted.write_text(item.nodeid)
                    return False
            watch.stop()
            noted.write_text(repr((seconds, watch.get_data().contexts_by_lineno(str(self._source)))))
            return True

        if in_a_child(work) is not True:
            raise pytest.UsageError(f"{noted.read_text()} fails without any change to {self._source.name}")
        return Baseline(*ast.literal_eval(noted.read_text()))

    def _survives(
        self, mutant: Mutant, session: pytest.Session, items: list[pytest.Item], usual: Mapping[str, float]
    ) -> bool:
        original = self._source.read_text()
        mutated = mutant.apply(original)
        changed = dict(code_by_name(compile(mutated, str(self._source), "exec")))[mutant.function]

        def work() -> bool:
            for function in self._functions[mutant.function]:
                function.__code__ = changed
            run(items, session, usual)
            return session.testsfailed == 0

        self._source.write_text(mutated)  # for processes that the tests start
        try:
            return in_a_child(work) is True
        finally:
            self._source.write_text(original)


def code_by_name(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The functions in a module's code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from code_by_name(constant)


def run(items: list[pytest.Item], session: pytest.Session, usual: Mapping[str, float] | None = None) -> None:
    """Run tests up to the first that fails. One that takes much longer than it did ends the process."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        if usual is not None:
            signal.setitimer(signal.ITIMER_REAL, 5 + 10 * usual[item.nodeid])
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return


def in_a_child(work: Callable[[], bool]) -> bool | None:
    """What `work` returns in a forked process; None if that ended otherwise."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setpgid(0, 0)  # with the processes that tests start
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            status = 0 if work() else 1
        finally:
            os._exit(status)
    try:
        _, how = os.waitpid(child, 0)
        return {0: True, 1: False}.get(os.waitstatus_to_exitcode(how))
    finally:  # also on an interrupt, and for processes that a test left behind
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def chosen_mutants(source: Path, lines: str, sample: int | None) -> tuple[int, list[Mutant]]:
    """How many mutants there are, and those to run."""
    first, _, last = lines.partition("-")
    wanted = range(int(first), int(last or first) + 1) if lines else range(sys.maxsize)
    possible = [mutant for mutant in mutants_of(source.read_text()) if mutant.line in wanted]
    if sample is None or sample >= len(possible):
        return len(possible), possible
    return len(possible), sorted(random.Random(0).sample(possible, sample), key=lambda mutant: mutant.span)


def examine(argument: str, sample: int | None) -> bool:
    """Run the mutants of one file, or of some of its lines, in a copy of the tree. False if that could not be done."""
    name, _, lines = argument.partition(":")
    tests = [f"tests/{test}" for test in TESTS[str(Path(name).relative_to("src/overspill"))]]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, log = Path(folder) / "tree", Path(folder) / "log"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        count, mutants = chosen_mutants(tree / name, lines, sample)

        def session() -> bool:
            survivors = os.fdopen(os.dup(1), "w", buffering=1)
            with log.open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = str(tree / "src")
            plugin = Mutating(tree / name, mutants, survivors)
            without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "timeout")]
            status = pytest.main(["-q", "-s", "--tb=line", f"--basetemp={tree / 'tmp'}", *without, *tests], [plugin])
            survivors.write(f"{name}: {count} mutants, {len(mutants)} run, {plugin.survived} survived\n")
            return status == 0

        done = in_a_child(session)
        if not done:
            sys.stderr.write(f"{name}: could not be examined\n{log.read_text()[-5000:]}\n")
        return bool(done)


def main() -> None:
    """Examine the files that the command line names, or all that have tests listed here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="sources, each with a line or lines (FILE:10-20) if not all of it")
    parser.add_argument("--sample", type=int, help="so many mutants of each file, the same ones each time")
    options = parser.parse_args()
    files = options.files or [f"src/overspill/{name}" for name in TESTS]
    examined = [examine(file, options.sample) for file in files]
    sys.exit(not all(examined))


if __name__ == "__main__":
    main()
