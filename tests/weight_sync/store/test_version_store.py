import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from omni_proxy.weight_sync.store import filesystem
from omni_proxy.weight_sync.store.manifest import SafetensorsError
from omni_proxy.weight_sync.store.version_store import (
    InsufficientSpace,
    UnknownVersion,
    VersionStore,
)
from tests.example_counts import examples
from tests.weight_sync.store.drafts import store_version, tensor_content, tensor_spec, write


@pytest.fixture
def store(tmp_path):
    version_store = VersionStore(tmp_path / "disk", memory=tmp_path / "memory")
    yield version_store
    version_store.close()


def reopen(store):
    store.close()
    return VersionStore(store.folder, keep=store.keep, memory=store.folder.parent / "memory")


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_version_can_be_loaded_with_safetensors(store):
    import torch
    from safetensors.torch import load_file

    buckets = [
        [tensor_spec("h", 3, dtype="bfloat16"), tensor_spec("none", 0, 4)],
        [tensor_spec("f", 2, 5), tensor_spec("s")],
    ]
    version = store_version(store, buckets)
    loaded = load_file(version.folder / "model.safetensors")
    for tensor in (tensor for bucket in buckets for tensor in bucket):
        found = loaded[tensor.name]
        assert (str(found.dtype), tuple(found.shape)) == (f"torch.{tensor.dtype}", tensor.shape)
        assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == tensor_content(tensor, 0)


def test_separate_buckets_become_files_with_an_index(store):
    draft = store.begin(100)
    for seed, bucket in enumerate(
        ([tensor_spec("a", 3)], [tensor_spec("b", 2)], [tensor_spec("a", 3)])
    ):
        draft.set_digests(write(draft.add([bucket]), [bucket], seed))
    version = store.seal(draft)
    assert json.loads((version.folder / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 5},
        "weight_map": {"a": "model-00003.safetensors", "b": "model-00002.safetensors"},
    }
    assert store.digest(version)
    assert reopen(store).find(1).digests == version.digests


def test_a_draft_is_no_version_until_it_is_sealed(store, tmp_path):
    draft = store.begin(100)
    draft.add([[tensor_spec("a", 3)]])
    assert (store.versions(), names(tmp_path / "memory")) == ([], ["v1.partial"])
    again = reopen(store)
    assert (again.versions(), names(tmp_path / "memory")) == ([], [])
    again.close()


def test_the_version_published_last_is_current_whatever_its_number(store, tmp_path):
    one = store.publish(store_version(store), "a", 1)
    two = store.publish(store_version(store), "b", 2)
    assert (store.current, store.previous) == (two, one)
    republished = store.publish(one, "a", 3)
    assert (store.current, store.previous.number) == (republished, 2)
    store.persist(republished)
    assert (tmp_path / "disk" / "current").resolve() == (tmp_path / "memory" / "v1").resolve()
    shutil.rmtree(tmp_path / "memory")
    again = reopen(store)
    assert (again.current.number, again.current.epoch) == (1, 3)
    assert (tmp_path / "disk" / "current").resolve() == tmp_path / "disk" / "v1"
    again.close()


def test_a_version_is_found_by_its_number_and_by_its_label(store):
    store.publish(store_version(store), "7", 1)
    store.publish(store_version(store), "step-2", 2)
    assert [store.find(wanted).number for wanted in (1, "7", "step-2", "2")] == [1, 1, 2, 2]
    with pytest.raises(UnknownVersion, match=r"there are: version 2 \('step-2'\), version 1"):
        store.find("step-9")


def test_only_the_current_version_stays_in_memory_once_others_are_on_the_disk(store, tmp_path):
    one = store.publish(store_version(store), "a", 1)
    store.persist(one)
    assert names(tmp_path / "memory") == ["v1"]
    two = store.publish(store_version(store), "b", 2)
    store.persist(two)
    assert (names(tmp_path / "memory"), names(tmp_path / "disk")) == (
        ["v2"],
        ["current", "v1", "v2"],
    )


def test_an_orderly_close_frees_memory_and_keeps_all_versions(store, tmp_path):
    store.persist(store.publish(store_version(store), "a", 1))
    store.publish(store_version(store), "b", 2)
    store.leave()
    assert (names(tmp_path / "memory"), names(tmp_path / "disk")) == (["v2"], ["current", "v1"])
    again = reopen(store)
    assert [version.label for version in again.versions()] == ["b", "a"]
    again.close()


def test_a_leased_version_stays_until_the_lease_ends(store, tmp_path):
    one = store.publish(store_version(store), "a", 1)
    with store.lease(one) as leased:
        for epoch in (2, 3):
            store.publish(store_version(store), "b", epoch)
        assert leased.folder.is_dir()
    assert names(tmp_path / "memory") == ["v2", "v3"]
    with pytest.raises(UnknownVersion), store.lease(one):
        pass


def test_a_deleted_store_folder_is_created_again_for_the_next_version(store, tmp_path):
    draft = store.begin(100)
    draft.set_digests(write(draft.add([[tensor_spec("a", 3)]]), [[tensor_spec("a", 3)]], 1))
    shutil.rmtree(tmp_path / "disk")
    version = store.publish(store.seal(draft), "v1", 1)
    assert (store.current.label, store.current.epoch) == ("v1", 1)
    store.persist(version)
    assert reopen(store).current.on_disk


def test_a_tensor_name_that_safetensors_reserves_is_refused(store):
    draft = store.begin(100)
    with pytest.raises(SafetensorsError, match="'__metadata__'"):
        draft.add([[tensor_spec("a", 3), tensor_spec("__metadata__", 3)]])


def test_a_version_that_fits_nowhere_is_refused_with_the_sizes(store):
    with pytest.raises(InsufficientSpace, match=rf"needs {1 << 60} bytes and .*disk has \d+ free"):
        store.begin(1 << 60)
    draft = store.begin(10)
    with pytest.raises(
        InsufficientSpace, match=rf"needs {1 << 60} bytes and .*memory has \d+ free"
    ):
        store.require_room(draft, 1 << 60)


@pytest.mark.parametrize("damage", ["short", "long", "header", "record"])
def test_a_version_that_differs_from_its_manifest_is_set_aside(store, tmp_path, damage):
    version = store.publish(store_version(store), "a", 1)
    file = version.folder / "model.safetensors"
    if damage in ("short", "long"):
        os.truncate(file, file.stat().st_size + (1 if damage == "long" else -1))
    elif damage == "header":
        file.write_bytes(file.read_bytes().replace(b'"U8"', b'"I8"', 1))
    else:
        (version.folder / "record.json").write_text("{")
    again = reopen(store)
    assert (again.versions(), names(tmp_path / "memory")) == ([], ["v1.damaged"])
    again.close()


def test_changed_bytes_are_detected_by_their_digest(store):
    version = store.publish(store_version(store), "a", 1)
    assert store.digest(version)
    file = version.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert not store.digest(version)
    assert (store.versions(), store.current) == ([], None)


@pytest.mark.parametrize("file_exists", [True, False])
def test_hashing_a_version_leaves_no_file_open(store, file_exists):
    buckets = [[tensor_spec(name, 3) for name in "abc"], [tensor_spec("d", 3)]]
    version = store_version(store, buckets)
    if not file_exists:
        (version.folder / version.manifest.tensors["d"].file).unlink()
    before = os.listdir("/proc/self/fd")
    with suppress(FileNotFoundError):
        assert store.digest(version) == file_exists
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_missing_digests_are_computed_afterwards(store):
    expected = store_version(store).digests
    version = store_version(store, digests=False)
    assert version.digests == {}
    assert store.digest(version)
    assert store.find(2).digests == expected


def test_a_folder_belongs_to_one_program_at_a_time(store):
    with pytest.raises(filesystem.StoreBusy, match="in use by another omni-proxy"):
        VersionStore(store.folder)


def test_versions_are_in_a_private_folder_in_shared_memory(tmp_path):
    if filesystem.is_in_memory(tmp_path):
        pytest.skip("the temporary folder is in memory itself")
    memory = filesystem.shared_memory_folder(tmp_path)
    try:
        assert filesystem.is_in_memory(memory)
        assert memory.stat().st_mode & 0o777 == 0o700
        assert filesystem.shared_memory_folder(memory) is None
    finally:
        memory.rmdir()


def test_the_store_imports_no_model_runtime():
    code = (
        "import sys, omni_proxy.weight_sync.store.version_store; "
        "print(*sorted({'torch', 'numpy', 'safetensors'} & sys.modules.keys()))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == ""


class Machine(RuleBasedStateMachine):
    """Compares the store with a table; a `crash` drops the object, and optionally the memory."""

    drafts, leased = Bundle("drafts"), Bundle("leased")

    def __init__(self):
        super().__init__()
        import tempfile
        from pathlib import Path

        self.root = Path(tempfile.mkdtemp(prefix="omni-proxy-store-"))
        self.table, self.epoch, self.last_number = {}, 0, 0
        self.leases, self.keep = [], 2
        self.open()

    def open(self):
        self.store = VersionStore(self.root / "disk", keep=self.keep, memory=self.root / "memory")

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.root)

    def settle(self):
        """Remove from the table what the store must collect."""
        ranked = sorted((n for n in self.table if self.table[n]["epoch"]), key=self.epoch_of)
        kept = set(ranked[-self.keep :]) | {n for n in self.table if self.table[n]["pending"]}
        for number, row in list(self.table.items()):
            if number not in kept and not self.is_leased(number):
                del self.table[number]
            elif number in kept and "disk" in row["at"] and not row["pending"]:
                only_on_disk = ranked[-1:] != [number] and (number, "memory") not in self.leases
                row["at"] -= {"memory"} if only_on_disk else set()

    def epoch_of(self, number):
        return self.table[number]["epoch"]

    def is_leased(self, number):
        return any(number == held for held, _ in self.leases)

    def draw_number(self, data):
        return data.draw(st.sampled_from(sorted(self.table))) if self.table else None

    @rule(target=drafts)
    def begin(self):
        draft = self.store.begin(100)
        self.last_number += 1
        self.settle()
        assert draft.number == self.last_number
        bucket = [tensor_spec("a", 3)]
        draft.set_digests(write(draft.add([bucket]), [bucket], draft.number))
        return draft, self.store

    @rule(begun=consumes(drafts), seals=st.booleans())
    def end(self, begun, seals):
        draft, store = begun
        if store is not self.store:
            return
        if not seals:
            store.discard(draft)
            return
        store.seal(draft)
        self.table[draft.number] = {"epoch": 0, "pending": True, "at": {"memory"}}

    @rule(data=st.data())
    def publish(self, data):
        if (number := self.draw_number(data)) is not None:
            self.epoch += 1
            self.store.publish(self.store.find(number), f"e{self.epoch}", self.epoch)
            self.table[number] |= {"epoch": self.epoch, "pending": False}
            self.settle()

    @rule(data=st.data())
    def discard(self, data):
        if (number := self.draw_number(data)) is not None:
            self.store.discard(self.store.find(number))
            self.table[number]["pending"] = False
            self.settle()

    @rule(data=st.data())
    def persist(self, data):
        if (number := self.draw_number(data)) is not None:
            self.store.persist(self.store.find(number))
            self.table[number]["at"].add("disk")
            self.settle()

    @rule(target=leased, data=st.data())
    def lease(self, data):
        if (number := self.draw_number(data)) is None:
            return None
        lease = self.store.lease(self.store.find(number))
        place = "memory" if "memory" in self.table[number]["at"] else "disk"
        assert lease.__enter__().folder == self.root / place / f"v{number}"
        self.leases.append((number, place))
        return lease, (number, place), self.store

    @rule(lease=consumes(leased))
    def release(self, lease):
        if lease is not None and lease[2] is self.store:
            self.leases.remove(lease[1])
            lease[0].__exit__(None, None, None)
            self.settle()

    @rule(data=st.data(), loses_memory=st.booleans())
    def crash(self, data, loses_memory):
        self.store.close()
        self.leases = []
        if data.draw(st.booleans()):  # interrupted a removal
            (self.root / "disk" / "v99.partial.removed").mkdir(exist_ok=True)
        if loses_memory:
            shutil.rmtree(self.root / "memory")
        for number, row in list(self.table.items()):
            row["pending"] = False
            row["at"] -= {"memory"} if loses_memory else set()
            if not row["at"]:
                del self.table[number]
        self.last_number = max(self.table, default=0)
        self.open()

    @invariant()
    def the_store_equals_the_table(self):
        versions = {
            version.number: (version.epoch, version.in_memory, version.on_disk)
            for version in self.store.versions()
        }
        assert versions == {
            n: (row["epoch"], "memory" in row["at"], "disk" in row["at"])
            for n, row in self.table.items()
        }
        newest = max((row["epoch"] for row in self.table.values()), default=0)
        assert (self.store.current.epoch if self.store.current else 0) == newest

    @invariant()
    def files_are_complete_and_no_other_files_exist(self):
        for version in self.store.versions():
            file = version.folder / "model.safetensors"
            expected = bytes((version.number + place) % 251 for place in range(3))
            assert file.read_bytes().endswith(expected)
        for place in ("memory", "disk"):
            numbers = {n for n in names(self.root / place) if n.startswith("v") and "." not in n}
            assert numbers == {f"v{n}" for n, row in self.table.items() if place in row["at"]}


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(25), stateful_step_count=25)
