"""This proxy applies the weight state that another proxy publishes."""

from datetime import UTC, datetime

import msgspec
import pytest

from omni_proxy.cluster_member.weight_state import (
    FollowedWeights,
    WeightState,
    collect,
    decode_state,
    encode_state,
)
from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.registry import Fleet
from omni_proxy.weight_sync.protocol.published_version import PublishedVersion, TargetVersion
from omni_proxy.weight_sync.state_journal import JournalFile, StateJournal

A, B = "http://a:1", "http://b:1"


class Proxy:
    def __init__(self, folder) -> None:
        self.fleet = Fleet()
        self.journal = StateJournal(self.fleet, JournalFile(folder))
        specs = [
            WorkerSpec(url, None, frozenset(CAPABILITIES), False, 1, 0, "file") for url in (A, B)
        ]
        self.fleet.apply(specs, datetime.now(UTC))
        self.followed = FollowedWeights(self.fleet, self.journal)

    def worker(self, url):
        return self.fleet.find(url)

    def reasons(self, url):
        return self.worker(url).cordon_reasons

    def state(self, token, number, *, busy=True):
        state = collect(self.fleet, self.journal, holder="p", busy=busy)
        fields = {name: getattr(state, name) for name in state.__struct_fields__}
        return WeightState(**fields | {"fencing_token": token, "number": number})


@pytest.fixture
def proxies(tmp_path):
    return Proxy(tmp_path / "holder"), Proxy(tmp_path / "other")


def update_worker(holder, url, label, epoch):
    holder.fleet.set_version(holder.worker(url), label, epoch)
    holder.journal.published = PublishedVersion(epoch, label)


def test_a_worker_is_held_until_it_has_its_new_version(proxies):
    holder, other = proxies
    holder.fleet.cordon(holder.worker(A), "updating")
    assert other.followed.apply(holder.state(1, 1))
    assert other.reasons(A) == {"updating"}
    assert other.followed.is_held(other.worker(A))
    assert not other.followed.is_held(other.worker(B))
    update_worker(holder, A, "v1", 1)
    holder.fleet.uncordon(holder.worker(A), "updating")
    seen = []
    other.fleet.watch_worker(
        lambda worker: seen.append((worker.url, *worker.cordon_reasons, worker.weight_label))
    )
    assert other.followed.apply(holder.state(1, 2, busy=False))
    assert [row for row in seen if row[0] == A] == [(A, "updating", "v1"), (A, "v1")]
    assert other.reasons(A) == set()
    assert (other.worker(A).weight_label, other.worker(A).weight_epoch) == ("v1", 1)
    assert other.journal.published.epoch == 1


def test_an_older_state_changes_nothing(proxies):
    holder, other = proxies
    assert other.followed.apply(holder.state(2, 1))
    holder.fleet.cordon(holder.worker(A), "updating")
    assert not other.followed.apply(holder.state(1, 9))
    assert not other.followed.apply(holder.state(2, 1))
    assert other.reasons(A) == set()


def test_workers_of_a_lost_holder_are_uncertain_until_they_are_updated(proxies):
    holder, other = proxies
    assert other.followed.apply(holder.state(1, 1))
    holder.fleet.cordon(holder.worker(A), "updating")
    assert other.followed.apply(holder.state(1, 2))
    other.followed.orphan("it was lost")
    assert other.reasons(A) == {"uncertain"}
    assert other.journal.uncertain == {A: "it was lost"}
    update_worker(holder, A, "v2", 2)
    holder.fleet.uncordon(holder.worker(A), "updating")
    assert other.followed.apply(holder.state(2, 1, busy=False))
    assert other.reasons(A) == set()
    assert other.journal.uncertain == {}


def test_a_worker_that_this_proxy_marked_uncertain_stays_uncertain(proxies):
    holder, other = proxies
    assert other.followed.apply(holder.state(1, 1))
    other.journal.mark_uncertain({B: "missed an update"})
    update_worker(holder, A, "v1", 1)
    assert other.followed.apply(holder.state(1, 2))
    assert other.journal.uncertain == {B: "missed an update"}


def test_uncertain_and_paused_workers_are_cordoned_at_all_proxies(proxies):
    holder, other = proxies
    holder.journal.mark_uncertain({A: "cut short"})
    holder.journal.cordon_paused(B)
    assert other.followed.apply(holder.state(1, 1))
    assert (other.reasons(A), other.reasons(B)) == ({"uncertain"}, {"paused"})
    holder.journal.clear_uncertain([A])
    holder.journal.uncordon_paused(B)
    assert other.followed.apply(holder.state(1, 2))
    assert (other.reasons(A), other.reasons(B)) == (set(), set())


def test_a_state_survives_its_encoding(proxies):
    holder, _ = proxies
    holder.journal.mark_uncertain({A: "cut short"})
    state = holder.state(3, 4)
    assert decode_state(encode_state(state)) == state
    assert decode_state(b"\x01") is None


def test_the_key_of_the_fencing_token_is_the_one_that_other_releases_read():
    assert msgspec.msgpack.decode(encode_state(WeightState(fencing_token=5)))["token"] == 5


TOO_HIGH = 2**62 + 1


@pytest.mark.parametrize(
    "fields",
    [
        {"fencing_token": TOO_HIGH},
        {"number": TOO_HIGH},
        {"number": -1},
        {"versions": {A: ("v1", TOO_HIGH)}},
        {"published": PublishedVersion(TOO_HIGH, None)},
        {"published": PublishedVersion(1, None, highest=TOO_HIGH)},
        {"published": PublishedVersion(1, None, {A: TargetVersion(label=None, epoch=TOO_HIGH)})},
    ],
)
def test_a_state_with_numbers_that_no_proxy_reaches_is_invalid(fields):
    """Each later state would count as an older one, or could not be encoded."""
    assert decode_state(encode_state(WeightState(**fields))) is None
