import shutil
import threading

import pytest
import trio

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.weight_sync.store.service import StoreService
from omni_proxy.weight_sync.store.version_store import UnknownVersion
from tests.weight_sync.store.drafts import delete_store, store_version


class Kept:
    """A version store whose settings a test may change."""

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
async def kept(tmp_path):
    made = Kept(tmp_path)
    yield made
    made.delete_store()


async def test_a_pending_version_keeps_the_store_in_its_folder(kept):
    store = await kept.open()
    version = store_version(store)
    kept.move("two")
    assert await kept.open() is store
    async with kept.store_service.lease(version) as leased:
        assert leased.number == version.number
    await kept.store_service.published(version, "v1", 1)
    assert store.current.epoch == 1
    assert await kept.open() is not store
    with pytest.raises(UnknownVersion):
        async with kept.store_service.lease(version):
            pass


async def test_a_change_of_the_store_blocks_only_leases(kept, nursery):
    store = await kept.open()
    version = store_version(store)
    taken, over = threading.Event(), threading.Event()

    def change():
        with store._lock:
            taken.set()
            over.wait(30)

    thread = threading.Thread(target=change)
    thread.start()
    taken.wait()
    leased = trio.Event()

    async def lease():
        async with kept.store_service.lease(version):
            leased.set()

    nursery.start_soon(lease)
    await trio.sleep(0.05)
    assert not leased.is_set()
    over.set()
    with trio.fail_after(30):
        await leased.wait()
    thread.join()


async def test_publishing_into_an_unusable_folder_is_reported(kept):
    store = await kept.open()
    version = store_version(store)
    store.discard(version)
    kept.move("two")
    (kept._folder / "two").write_text("no folder")
    await kept.store_service.published(version, "v1", 1)
    assert kept.store_service.error


async def test_a_version_deleted_from_outside_is_forgotten(kept):
    store = await kept.open()
    version = store_version(store)
    await kept.store_service.published(version, "v1", 1)
    await kept.store_service.run_in_thread(store.persist, version)
    assert version.in_memory
    shutil.rmtree(version.folder)
    async with kept.store_service.lease(version) as leased:
        assert (leased.in_memory, leased.folder) == (False, store.folder / "v1")
    for root in store.roots:
        shutil.rmtree(root)
    with pytest.raises(UnknownVersion):
        async with kept.store_service.lease(version):
            pass
    assert store_version(store).number == 2


async def test_paths_of_its_versions_are_known(kept):
    store = await kept.open()
    version = store_version(store)
    assert kept.store_service.has_path(str(version.folder))
    assert not kept.store_service.has_path("/models/m")
