import pytest
import trio

from omni_proxy.dataplane import engine_calls
from omni_proxy.dataplane.loop import timers
from tests.program_forkserver import OWN_INTERPRETERS
from tests.promises.support.early_readers import EarlyReaders
from tests.promises.support.fakes import answering, counted, fake_workers
from tests.promises.support.replica_program import PATIENCE_SECS, healthy, program
from tests.promises.support.sync_program import Fleets
from tests.promises.support.sync_steps import repaired_fleet
from tests.promises.support.sync_trainer import Trainers
from tests.promises.support.tiny_fleet import weights_in
from tools.screenshots.chromium import Browser, find_chromium


@pytest.fixture(autouse=True)
def quick_clocks(monkeypatch):
    """Checks deadlines of data planes inside the test more often than four times a second."""
    monkeypatch.setattr(timers, "SWEEP_SECS", 0.02)
    monkeypatch.setattr(engine_calls, "AGAIN_SECS", 0.05)


@pytest.fixture(autouse=True)
def own_state_folder(monkeypatch, tmp_path):
    """Gives each test its own state folder.

    Programs without a state file name their state journal by their listen address, which is port 0
    in all tests: one program would read workers of another as uncertain.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def own_interpreters(monkeypatch):
    """Child processes of the program are started by its own command lines instead of forks."""
    monkeypatch.setenv(OWN_INTERPRETERS, "1")


@pytest.fixture
async def soon():
    """A deadline for tests that hang, not a claim about speed."""
    with trio.fail_after(120):
        yield


@pytest.fixture
async def worker():
    """A worker that answers every request with `{}`."""
    async with fake_workers(answering(counted(b"{}"))) as (worker,):
        yield worker


@pytest.fixture
async def taking(nursery):
    """Starts a worker that runs `script(taker)` for each request."""

    async def start(script):
        worker = EarlyReaders(script)
        await nursery.start(worker.serve)
        return worker

    return start


# Names that an attacker's name server resolves to the proxy.
NAMES = "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP rebound.example 127.0.0.1"


@pytest.fixture(scope="session")
def browser():
    """One browser for all modules; each test has a tab with a separate profile."""
    opened = Browser(find_chromium(), NAMES)
    yield opened
    opened.close()


@pytest.fixture
async def page(browser):
    """A tab; checks at the end that its page reported no error."""
    async with browser.tab() as page:
        await page.resize(1400, 1000)
        yield page
        assert page.console_errors == []


@pytest.fixture(scope="session")
def trainers():
    started = Trainers()
    yield started
    started.close()


@pytest.fixture(scope="session")
def fleets(tmp_path_factory):
    """Real replicas of the tiny model, for the syncs of all modules."""
    for name in ("torch", "tiktoken", "safetensors.torch"):
        pytest.importorskip(name)
    started = Fleets(tmp_path_factory.mktemp("fleets"))
    _FLEETS.append(started)
    yield started
    _FLEETS.remove(started)
    started.close()


_FLEETS = []


def pytest_runtest_teardown(item, nextitem):
    """Stops the fleets before tests that do not use them: five processes that are probed three
    times a second take a tenth of a core. The next module that uses them starts them again."""
    if nextitem is None or "fleets" not in nextitem.fixturenames:
        for fleets in _FLEETS:
            fleets.close()


@pytest.fixture
def within_secs():
    """A deadline for tests of syncs that hang, not a claim about speed."""
    return 180


@pytest.fixture
async def seen(running, trainers, within_secs):
    """A client of the module's fleet `running`, which is repaired and waits for a trainer."""
    async with running.client() as client:
        await repaired_fleet(client, trainers)
        with trio.fail_after(within_secs):
            yield client


@pytest.fixture
def new_weights(tmp_path):
    """A weights file for replicas of the tiny model."""
    return weights_in(tmp_path)


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """One replica with text and audio stages for the module."""
    with program(tmp_path_factory.mktemp("replica")) as running:
        yield running


@pytest.fixture
async def client(replica):
    """An HTTP client of the replica, which is healthy."""
    with trio.fail_after(PATIENCE_SECS):
        async with replica.client() as client:
            await healthy(client)
            yield client
