"""A test that does not end fails, and the next tests run."""

import re

from tests.inner_pytest import run_pytest

CONFTEST = """
from tests.time_limit import TimeLimit

def pytest_configure(config):
    config.pluginmanager.register(TimeLimit(0.5, 0.5))
"""
# The names are not those of tests: each test of this repository checks something.
TESTS = """
import threading
import pytest
import trio

ended = []

@pytest.fixture
async def resource():
    try:
        yield
    finally:
        ended.append("resource")

async def case_waits(resource):
    await trio.sleep_forever()

async def case_waits_with_a_clock_of_its_own(resource, mock_clock):
    await trio.sleep(1)

def case_waits_for_a_lock():
    threading.Semaphore(0).acquire()

async def case_waits_although_it_is_cancelled():
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()

async def case_blocks_the_event_loop():
    threading.Semaphore(0).acquire()

async def case_waits_a_long_time_of_its_clock(autojump_clock):
    await trio.sleep(10_000)

async def case_fails_by_itself():
    raise ValueError("of the test")

def case_the_fixtures_of_cancelled_tests_have_ended():
    assert ended == ["resource"] * 2
"""


def test_a_test_that_waits_without_an_end_fails_at_the_limit(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = true\n")
    (tmp_path / "test_it.py").write_text(TESTS.replace("def case_", "def test_"))
    result = run_pytest(tmp_path, "-p", "pytest_trio.plugin")
    failed = re.findall(r"^FAILED \S+::(\w+)", result.stdout, re.MULTILINE)
    assert failed == [
        "test_waits",
        "test_waits_with_a_clock_of_its_own",
        "test_waits_for_a_lock",
        "test_waits_although_it_is_cancelled",
        "test_blocks_the_event_loop",
        "test_fails_by_itself",
    ], result.stdout + result.stderr
    assert "2 passed" in result.stdout
    assert "TimeLimitError: the test has not ended after 0.5 s" in result.stdout
    assert "await trio.sleep_forever()" in result.stdout  # where it waited
