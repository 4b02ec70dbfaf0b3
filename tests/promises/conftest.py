import pytest
import trio

from omni_proxy.dataplane import engine_calls
from omni_proxy.dataplane.loop import timeouts
from tests.program_forkserver import OWN_INTERPRETERS
from tests.promises.early_readers import EarlyReaders
from tests.promises.fakes import answering, counted, fake_workers
from tests.promises.replica_program import PATIENCE_SECS, healthy, program
from tests.promises.sync_program import Fleets
from tests.promises.sync_steps import repaired_fleet
from tests.promises.sync_trainer import Trainers
from tests.promises.tiny_fleet import weights_in
from tools.screenshots.chromium import Browser, find_chromium


@pytest.fixture(autouse=True)
def quick_clocks(monkeypatch):
    """A deadline of a data plane inside the test is noticed sooner than four times a second."""
    monkeypatch.setattr(timeouts, "SWEEP_SECS", 0.02)
    monkeypatch.setattr(engine_calls, "AGAIN_SECS", 0.05)


@pytest.fixture(autouse=True)
def own_state_folder(monkeypatch, tmp_path):
    """Programs without a state file keep their journal of weights by their listen address, and all
    of these listen on port 0: one would hold back workers whose ports another knows as uncertain."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def own_interpreters(monkeypatch):
    """What the program starts itself are processes as it starts them, not forks."""
    monkeypatch.setenv(OWN_INTERPRETERS, "1")


@pytest.fixture
async def soon():
    """A deadline for a test that hangs, not a claim about speed."""
    with trio.fail_after(120):
        yield


@pytest.fixture
async def worker():
    """One that answers everything with `{}`."""
    async with fake_workers(answering(counted(b"{}"))) as (made,):
        yield made


@pytest.fixture
async def taking(nursery):
    """A worker that runs `script(taker)` for each request."""

    async def made(script):
        worker = EarlyReaders(script)
        await nursery.start(worker.serve)
        return worker

    return made


# What a stranger's name server can do to a browser.
NAMES = "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP rebound.example 127.0.0.1"


@pytest.fixture(scope="session")
def browser():
    """For all modules: each test has a tab with a profile of its own."""
    made = Browser(find_chromium(), NAMES)
    yield made
    made.close()


@pytest.fixture
async def page(browser):
    """A tab; at the end nothing on it has gone wrong."""
    async with browser.tab() as page:
        await page.resize(1400, 1000)
        yield page
        assert page.complaints == []


@pytest.fixture(scope="session")
def trainers():
    made = Trainers()
    yield made
    made.close()


@pytest.fixture(scope="session")
def fleets(tmp_path_factory):
    """Real replicas of the tiny model, for the syncs of all modules."""
    for name in ("torch", "tiktoken", "safetensors.torch"):
        pytest.importorskip(name)
    made = Fleets(tmp_path_factory.mktemp("fleets"))
    _FLEETS.append(made)
    yield made
    _FLEETS.remove(made)
    made.close()


_FLEETS = []


def pytest_runtest_teardown(item, nextitem):
    """Between modules that use them, the fleets end: five processes that are probed three times a
    second take a tenth of a core. The next module that uses them starts them again."""
    if nextitem is None or "fleets" not in nextitem.fixturenames:
        for each in _FLEETS:
            each.close()


@pytest.fixture
def within_secs():
    """A deadline for a test of a sync that hangs, not a claim about speed."""
    return 180


@pytest.fixture
async def seen(running, trainers, within_secs):
    """The fleet of a module as a trainer finds it: `running` is a module's own fixture."""
    async with running.client() as it:
        await repaired_fleet(it, trainers)
        with trio.fail_after(within_secs):
            yield it


@pytest.fixture
def new_weights(tmp_path):
    """A file for replicas of the tiny model."""
    return weights_in(tmp_path)


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """One replica of text and sound, for a module."""
    with program(tmp_path_factory.mktemp("replica")) as running:
        yield running


@pytest.fixture
async def client(replica):
    """Asks the replica, which is ready."""
    with trio.fail_after(PATIENCE_SECS):
        async with replica.client() as client:
            await healthy(client)
            yield client
