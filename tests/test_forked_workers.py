import re
from pathlib import Path

import pytest

from tests.inner_pytest import run_pytest

CONFTEST = """
from tests.forked_workers import ForkedWorkers

def pytest_configure(config):
    config.pluginmanager.register(ForkedWorkers(2, lambda: print("at the end")))
"""


@pytest.fixture
def run(tmp_path):
    """Runs test files in two workers; returns the exit status and the output."""

    def run(*options, extra_conftest="", conftest=CONFTEST, **files):
        (tmp_path / "conftest.py").write_text(conftest + extra_conftest)
        (tmp_path / "pytest.ini").write_text("[pytest]")
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        result = run_pytest(tmp_path, *options)
        return result.returncode, result.stdout + result.stderr

    return run


def test_results_of_all_workers_are_those_of_one_run(run):
    status, output = run(
        one="import pytest\ndef test_a(): pass\ndef test_b(): print('printed by b'); assert 0\n",
        two="import pytest\n@pytest.mark.skip\ndef test_c(): pass\ndef test_d(tmp_path): pass\n",
        three="def test_e(): raise ValueError\n",
    )
    assert status == 1
    assert "2 failed, 2 passed, 1 skipped" in output
    assert re.search(r"Captured stdout call -+\nprinted by b", output)
    assert output.count("printed by b") == 2  # once as output, once in the quoted source line


def test_a_worker_that_crashes_fails_its_test_and_the_others_run(run):
    status, output = run(
        one="import os\ndef test_a(): pass\ndef test_b(): os._exit(3)\ndef test_c(): pass\n",
        two="import os, signal\ndef test_d(): os.kill(os.getpid(), signal.SIGKILL)\n",
        three="def test_e(): pass\n",
        four="def test_f(): pass\n",
    )
    assert status == 1
    assert "2 failed, 4 passed" in output
    assert "the process of this test ended with status 3" in output
    assert "the process of this test ended with status -9" in output


def test_option_x_ends_the_run(run):
    text = "import time\ndef test_a(): assert 0\n"
    status, output = run("-x", one=text, two="import time\ndef test_b(): time.sleep(60)\n")
    assert status == 1
    assert "stopping after 1 failures" in output


FIXTURE = """
import os, pytest

def log_event(word):
    with open(os.environ["LOG"], "a") as file:
        file.write(f"{word} {os.getpid()}\\n")

@pytest.fixture(scope="session")
def thing():
    log_event("created")
    yield lambda: log_event("used")
    log_event("closed")
"""


def test_a_fixture_of_the_session_lasts_until_the_last_test_of_its_process(
    run, tmp_path, monkeypatch
):
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    test = "def test_it(thing): thing()\n"
    status, output = run(
        extra_conftest=FIXTURE, **dict.fromkeys(("one", "two", "three", "four"), test)
    )
    assert (status, "4 passed" in output) == (0, True), output
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) >= 6
    for pid in {pid for _, pid in lines}:
        words = [word for word, process in lines if process == pid]
        assert (words[0], words[-1]) == ("created", "closed")
        assert set(words[1:-1]) <= {"used"}


def test_a_thread_that_collecting_started_is_refused(run):
    text = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    status, output = run(one=text + "def test_a(): pass\n", two="def test_b(): pass\n")
    assert status == 4
    assert "collecting the tests has started 1 threads" in output


SHARING = """
from tests.forked_workers import ForkedWorkers
from tests.program_forkserver import close_forkservers, share_forkservers

def pytest_configure(config):
    config.pluginmanager.register(ForkedWorkers(2, close_forkservers, share_forkservers()))

def pytest_sessionfinish():
    close_forkservers()
"""
FORK = """
import os, socket, time
from pathlib import Path
from tests import program_forkserver

program_forkserver.IMPORTED["light"] = ()

def parent_of_a_fork():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fork = program_forkserver.forkserver().over(theirs, "tests.process_group.trainer_process")
        parent = Path(f"/proc/{fork.pid}/stat").read_text().rpartition(")")[2].split()[1]
        fork.kill()
        assert fork.wait() == -9
    return int(parent)

def test_it():
    with open(os.environ["LOG"], "a") as file:
        file.write(f"{os.getpid()} {parent_of_a_fork()}\\n")
    until = time.monotonic() + 60
    # Wait until the other worker has written, too.
    while len({line.split()[0] for line in open(os.environ["LOG"])}) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
"""


def test_workers_share_fork_servers_and_none_is_left(run, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    # A worker requests its second file before it runs the first.
    status, output = run(conftest=SHARING, one=FORK, two=FORK, three=FORK)
    assert (status, "3 passed" in output) == (0, True), output
    _, servers = zip(*map(str.split, log.read_text().splitlines()), strict=True)
    assert len(set(servers)) == 1
    assert not Path(f"/proc/{servers[0]}").exists()
