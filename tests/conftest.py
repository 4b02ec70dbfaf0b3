"""Settings of every test process and of the processes that it starts.

torch looks up the host name of each peer address in the DNS, even that of 127.0.0.1. A lost
response would take 5 s with the default timeout.
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
from tests.time_limit import TimeLimit

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# Hundreds of processes import the same modules: compile them once, whatever the environment sets.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A loaded machine makes tests slow, which is not a failure.
for name, share in SHARES.items():
    settings.register_profile(
        name,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=round(100 * share),
    )
settings.load_profile("patient")

# Imported modules and collected tests are not garbage. Searching them takes a third of the time.
gc.disable()

GIVEN_UP_SECS = 90.0
OUTSIDE_GLOO = ("weights-digest", "weights-pages")  # these may wait for bytes without an end


@pytest.fixture
def logging_as_it_was():
    """Restores logging after the test. During it, handlers of earlier tests are removed."""
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
    parser.addoption(
        "--processes", type=int, default=1, help="number of processes that run the tests"
    )


def pytest_configure(config):
    config.pluginmanager.register(TimeLimit())
    if (count := config.getoption("processes")) > 1:
        os.environ.setdefault(
            "OPENBLAS_NUM_THREADS", "1"
        )  # else its threads start when numpy is imported
        forked = ForkedWorkers(count, join_gloo_threads, share_forkservers())
        config.pluginmanager.register(forked)


def pytest_collection_finish():
    """Excludes imported modules and collected tests, a million objects, from garbage collection
    during tests."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Also excludes objects that a test file leaves behind, such as modules that it imported."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(scope="session", autouse=True)
def forkservers():
    """Fork servers that tests have started end with the tests."""
    yield
    close_forkservers()


def pytest_sessionfinish():
    join_gloo_threads()
    close_forkservers()


def join_gloo_threads():
    """Waits for threads in gloo: one that still runs when the interpreter ends would abort it."""
    until = time.monotonic() + GIVEN_UP_SECS
    for thread in threading.enumerate():
        if thread.name.startswith("weights-") and not thread.name.startswith(OUTSIDE_GLOO):
            thread.join(max(until - time.monotonic(), 0.0))


def pytest_terminal_summary(terminalreporter):
    """Reports tests that were skipped because they need a special environment."""
    skipped = terminalreporter.stats.get("skipped", [])
    for name in ("test_real_vllm", "test_envoy_picker"):
        report = next((each for each in skipped if name in each.nodeid), None)
        if report is not None:
            terminalreporter.section("NOT TESTED", sep="!", yellow=True, bold=True)
            terminalreporter.write_line(str(report.longrepr[2]).removeprefix("Skipped: "))
