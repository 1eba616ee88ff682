"""Set up all tests: one thread a process, shared traces and kernels, warm ranks, the order of files."""

import gc
import os
import tempfile
from collections import Counter

import pytest
import torch
from kernels import remember_traces
from ranks import pools, ranks, renew_pools  # noqa: F401  (fixtures)
from rows import MARKER, mark_other_rows_long
from saved import restoring, roots, short_blocks  # noqa: F401  (fixtures)
from updates import share_updates

CACHE = tempfile.TemporaryDirectory(prefix="fnshard-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name  # nothing is read from the user's caches, or written to them
torch.set_num_threads(1)
gc.set_threshold(20_000, 20, 20)  # lowering makes many objects: the default takes a tenth of the suite
os.environ.setdefault("FNSHARD_CACHE", CACHE.name + "/fnshard")  # jobs and workers share kernels
remember_traces()
share_updates()

# Workers begin with these, lest one of them still has a long file when the other is done.
LONGEST = (
    "test_guide.py", "test_finetune.py", "test_resume.py", "test_plan.py", "test_fit.py",
    "test_readme_commands.py", "test_matrix.py", "test_rewarded.py", "test_token_budget.py", "test_train.py",
    "test_meshes.py", "test_place_rules.py", "test_fuzz.py", "test_config.py", "test_untrusted.py",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Garbage collections look at what the module at hand made: all of a worker's would take them seconds."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Spare the end of a session, where pytest runs the garbage collector five times over everything."""
    gc.freeze()


class Failures:
    """Prints each failure at once; pytest shows all of them when the last test has ended."""

    def __init__(self, config: pytest.Config):
        self.plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print one that this process is told of; a worker has no terminal."""
        terminal = self.plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_sep("_", f"{report.when} of {report.nodeid}", red=True)
            terminal.write_line(report.longreprtext)
            terminal.flush()


class Seconds:
    """Shows, behind the slowest tests, the files that take the most time."""

    MOST = 25

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what a test, its setup or its teardown took towards its file."""
        self.files[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the files above a second, the longest first, and the sum of all."""
        terminalreporter.write_sep("=", f"{sum(self.files.values()):.0f} s of tests, by file")
        for name, seconds in self.files.most_common(self.MOST):
            if seconds >= 1:
                terminalreporter.write_line(f"{seconds:8.1f}s {name}")


def pytest_configure(config: pytest.Config) -> None:
    """Add what this suite shows besides pytest's own lines."""
    config.addinivalue_line("markers", MARKER)
    config.pluginmanager.register(Failures(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds())


@pytest.hookimpl(tryfirst=True)  # before `-m "not long"` is obeyed
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark rows of matrices as long; sort the longest files first, and in their order."""
    mark_other_rows_long(items, is_whole=not any("::" in argument for argument in config.args))
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
