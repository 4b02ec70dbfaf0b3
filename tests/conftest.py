"""What every process here should have, and those that it starts.

torch asks the DNS for the name of each address that it connects to or hears from, 127.0.0.1 too:
where an answer gets lost, that takes 5 s unless somebody says less.
"""

import gc
import logging
import os
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, settings

from tests.example_counts import SHARES
from tests.forked_workers import ForkedWorkers
from tests.program_forkserver import close_forkservers, share_forkservers

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# Hundreds of processes import the same modules: whatever the environment says, compile them once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A loaded machine is slow, not wrong.
for name, share in SHARES.items():
    settings.register_profile(
        name,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=round(100 * share),
    )
settings.load_profile("patient")

# Imports and collected tests are no garbage: to look for some among them takes a third of their time.
gc.disable()

GIVEN_UP_SECS = 90.0
OUTSIDE_GLOO = ("weights-digest", "weights-pages")  # one that waits for bytes may wait for ever


@pytest.fixture
def logging_as_it_was():
    """Afterwards, whatever the program has set up meanwhile; before, without what other tests left."""
    root = logging.getLogger()
    root.handlers[:] = [
        handler
        for handler in root.handlers
        if not type(handler).__module__.startswith("omni_proxy")
    ]
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def pytest_addoption(parser):
    parser.addoption("--processes", type=int, default=1, help="run the tests in so many processes")


def pytest_configure(config):
    if (count := config.getoption("processes")) > 1:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would start with numpy
        forked = ForkedWorkers(count, join_gloo_threads, share_forkservers())
        config.pluginmanager.register(forked)


def pytest_collection_finish():
    """A worker holds a million objects of imported modules and collected tests. No garbage
    collection that a test asks for, or sets off, needs to look at them."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Nor at what a module has left for good, such as the modules that it has imported."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(scope="session", autouse=True)
def forkservers():
    """Those that a test has started end with the tests."""
    yield
    close_forkservers()


def pytest_sessionfinish():
    join_gloo_threads()
    close_forkservers()


def join_gloo_threads():
    """A thread that gloo still holds when the interpreter ends would abort it: let it come back."""
    until = time.monotonic() + GIVEN_UP_SECS
    for thread in threading.enumerate():
        if thread.name.startswith("weights-") and not thread.name.startswith(OUTSIDE_GLOO):
            thread.join(max(until - time.monotonic(), 0.0))


def pytest_terminal_summary(terminalreporter):
    """What needs an environment of its own is not silently left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    for name in ("test_real_vllm", "test_envoy_picker"):
        report = next((each for each in skipped if name in each.nodeid), None)
        if report is not None:
            terminalreporter.section("NOT TESTED", sep="!", yellow=True, bold=True)
            terminalreporter.write_line(str(report.longrepr[2]).removeprefix("Skipped: "))
