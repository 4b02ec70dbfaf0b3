import shutil
import threading

import pytest
import trio

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.version_store import UnknownVersion
from tests.weight_sync.store.drafts import delete_store, store_version


class ServiceHarness:
    """A store service whose settings a test may change."""

    def __init__(self, folder):
        self.settings = WeightSyncConfig(mode="receive", store_dir=str(folder / "one"))
        self.store_service = StoreService(lambda: self.settings, folder)
        self._folder = folder
        self._stores = []

    async def open(self):
        self._stores.append(await self.store_service.open())
        return self._stores[-1]

    def move(self, name):
        self.settings = WeightSyncConfig(mode="receive", store_dir=str(self._folder / name))

    def delete_store(self):
        for store in self._stores:
            delete_store(store)


@pytest.fixture
async def harness(tmp_path):
    harness = ServiceHarness(tmp_path)
    yield harness
    harness.delete_store()


async def test_a_pending_version_keeps_the_store_in_its_folder(harness):
    store = await harness.open()
    version = store_version(store)
    harness.move("two")
    assert await harness.open() is store
    async with harness.store_service.lease(version) as leased:
        assert leased.number == version.number
    await harness.store_service.published(version, "v1", 1)
    assert store.current.epoch == 1
    assert await harness.open() is not store
    with pytest.raises(UnknownVersion):
        async with harness.store_service.lease(version):
            pass


async def test_a_lease_waits_for_the_lock_of_the_store(harness, nursery):
    store = await harness.open()
    version = store_version(store)
    locked, released = threading.Event(), threading.Event()

    def change():
        with store._lock:
            locked.set()
            released.wait(30)

    thread = threading.Thread(target=change)
    thread.start()
    locked.wait()
    leased = trio.Event()

    async def lease():
        async with harness.store_service.lease(version):
            leased.set()

    nursery.start_soon(lease)
    await trio.sleep(0.05)
    assert not leased.is_set()
    released.set()
    with trio.fail_after(30):
        await leased.wait()
    thread.join()


async def test_publishing_into_an_unusable_folder_is_reported(harness):
    store = await harness.open()
    version = store_version(store)
    store.discard(version)
    harness.move("two")
    (harness._folder / "two").write_text("no folder")
    await harness.store_service.published(version, "v1", 1)
    assert str(harness._folder / "two") in harness.store_service.error


async def test_a_version_deleted_by_another_program_is_forgotten(harness):
    store = await harness.open()
    version = store_version(store)
    await harness.store_service.published(version, "v1", 1)
    await harness.store_service.run_in_thread(store.persist, version)
    assert version.in_memory
    shutil.rmtree(version.folder)
    async with harness.store_service.lease(version) as leased:
        assert (leased.in_memory, leased.folder) == (False, store.folder / "v1")
    for root in store.roots:
        shutil.rmtree(root)
    with pytest.raises(UnknownVersion):
        async with harness.store_service.lease(version):
            pass
    assert store_version(store).number == 2


async def test_the_service_recognizes_the_paths_of_its_versions(harness):
    store = await harness.open()
    version = store_version(store)
    assert harness.store_service.has_path(str(version.folder))
    assert not harness.store_service.has_path("/models/m")
