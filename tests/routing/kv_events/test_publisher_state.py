import msgspec
import pytest

from omni_proxy.routing.kv_events import publisher_state as tested
from omni_proxy.routing.kv_events.publisher_state import (
    FLUSH_SETTLE_SECS,
    RETRY_SECS,
    PublisherState,
)
from tests.routing.kv_events.published import Engine, keys_in, keys_of, state_after


def test_a_publisher_received_from_its_first_batch_on_is_exact():
    engine = Engine()
    engine.store((1, 2, 3, 4))
    engine.remove(hash((None, (1, 2, 3, 4))))
    state = state_after(engine)
    assert state.mode == "exact"
    assert keys_in(state) == keys_of({(1, 2)})


def test_a_late_subscriber_knows_nothing_until_the_cache_is_cleared():
    engine = Engine()
    engine.store((1, 2))
    late = engine.store((3, 4))
    state = state_after(engine, late)
    assert (state.mode, state.blocks.keys()) == ("inferred", [])
    state.receive(*engine.clear(), 0.0)
    state.receive(*engine.store((5, 6)), 0.0)
    assert state.mode == "exact"
    assert keys_in(state) == keys_of({(5, 6)})


def test_a_complete_replay_makes_a_late_subscriber_exact():
    engine = Engine()
    engine.store((1, 2))
    state = PublisherState(replays=True)
    state.connected(0.0)
    assert state.replay_from == 0
    live = engine.store((3, 4))
    state.receive(*live, 0.0)
    engine.replay(state)
    assert state.mode == "exact"
    assert keys_in(state) == keys_of({(1, 2), (3, 4)})


def test_a_replay_that_starts_later_than_requested_is_incomplete():
    engine = Engine(kept=1)
    engine.store((1, 2))
    engine.store((3, 4))
    state = PublisherState(replays=True)
    state.connected(0.0)
    engine.replay(state)
    assert state.mode == "inferred"
    assert "begins at batch 1" in state.reason
    assert not state.blocks


def test_a_gap_ends_exactness_until_a_replay_fills_it():
    engine = Engine()
    engine.store((1, 2))
    state = state_after(engine, replays=True)
    engine.store((3, 4))
    state.receive(*engine.store((5, 6)), 0.0)
    assert (state.mode, state.replay_from) == ("degraded", 0)
    engine.replay(state)
    assert state.mode == "exact"
    assert keys_in(state) == keys_of({(1, 2), (3, 4), (5, 6)})


def test_a_gap_without_a_replay_socket_drops_everything():
    engine = Engine()
    engine.store((1, 2))
    state = state_after(engine)
    engine.store((3, 4))
    state.receive(*engine.store((5, 6)), 0.0)
    assert (state.mode, state.blocks.keys()) == ("degraded", [])
    assert "batches 1 to 1 were lost" in state.reason
    state.receive(*engine.clear(), 0.0)
    assert state.mode == "exact"


def test_a_gap_that_the_replay_no_longer_has_is_not_filled():
    engine = Engine()
    engine.store((1, 2))
    engine.store((7, 8))
    state = state_after(engine, replays=True)
    for first in (11, 13, 15):
        newest = engine.store((first, first + 1))
    engine.kept = 2
    state.receive(*newest, 0.0)
    engine.replay(state)
    engine.replay(state)  # the whole log is requested next
    assert (state.mode, state.blocks.keys(), state.replay_from) == ("degraded", [], None)


def test_a_restarted_publisher_is_followed_from_its_first_batch():
    old = Engine()
    old.store((1, 2))
    old.store((3, 4))
    state = state_after(old)
    new = Engine(at=old.at)
    state.receive(*new.store((5, 6)), 0.0)
    assert state.mode == "exact"
    assert keys_in(state) == keys_of({(5, 6)})


def test_a_restart_whose_first_batches_were_missed_drops_everything():
    old = Engine()
    for first in range(1, 9, 2):
        old.store((first, first + 1))
    state = state_after(old)
    new = Engine(at=old.at)
    new.store((21, 22))
    state.receive(*new.store((23, 24)), 0.0)
    assert (state.mode, state.blocks.keys()) == ("degraded", [])
    assert "restarted" in state.reason


def test_the_next_batch_number_proves_nothing_after_a_disconnect():
    old = Engine()
    old.store((1, 2))
    state = state_after(old, replays=True)
    state.disconnected()
    assert state.mode == "degraded"
    new = Engine(at=old.at)
    new.store((3, 4))
    state.receive(*new.store((5, 6)), 0.0)
    assert state.replay_from == 0
    new.replay(state)
    assert state.mode == "exact"
    assert keys_in(state) == keys_of({(3, 4), (5, 6)})


def test_a_replay_of_the_last_batch_proves_that_the_engine_is_the_same():
    engine = Engine(kept=1)
    engine.store((1, 2))
    engine.store((3, 4))
    state = state_after(engine, replays=True)
    state.disconnected()
    state.connected(0.0)
    assert state.replay_from == 1
    engine.replay(state)
    assert state.mode == "exact"
    assert keys_in(state) == keys_of({(1, 2), (3, 4)})


def test_a_broken_connection_without_a_replay_socket_drops_everything():
    engine = Engine()
    engine.store((1, 2))
    state = state_after(engine)
    state.disconnected()
    state.receive(*engine.store((3, 4)), 0.0)
    assert (state.mode, state.blocks.keys()) == ("degraded", [])


def test_a_flush_by_the_proxy_clears_at_once_and_ignores_late_batches():
    engine = Engine()
    engine.store((1, 2))
    late = engine.store((3, 4))
    state = state_after(engine, engine.log[0])
    engine.flush()
    state.flushed(10.0)
    assert (state.mode, state.blocks.keys()) == ("exact", [])
    state.receive(*late, 10.1)
    assert not state.blocks
    state.receive(*engine.clear(), 10.2)
    state.receive(*engine.store((5, 6)), 10.3)
    assert keys_in(state) == keys_of({(5, 6)})


def test_events_count_again_after_a_flush_that_the_engine_does_not_publish():
    engine = Engine()
    engine.store((1, 2))
    state = state_after(engine)
    state.flushed(10.0)
    state.receive(*engine.store((5, 6)), 10.0 + FLUSH_SETTLE_SECS)
    assert keys_in(state) == keys_of({(5, 6)})


def test_a_replay_from_before_a_flush_by_the_proxy_is_not_trusted():
    engine = Engine()
    engine.store((1, 2))
    state = state_after(engine, replays=True)
    engine.flush()
    state.flushed(0.0)
    state.disconnected()
    state.connected(0.0)
    engine.replay(state)
    assert (state.mode, state.blocks.keys()) == ("degraded", [])
    state.receive(*engine.clear(), 0.0)
    assert state.mode == "exact"


def test_an_undecodable_event_ends_exactness():
    engine = Engine()
    engine.store((1, 2))
    state = state_after(engine)
    state.receive(*engine._publish({"type": "BlockMoved"}), 0.0)
    assert (state.mode, state.blocks.keys(), state.undecodable) == ("degraded", [], 1)
    assert "BlockMoved" in state.reason


def test_two_publishers_on_one_address_are_not_trusted():
    engine = Engine()
    engine.store((1, 2))
    state = state_after(engine)
    state.receive(1, msgspec.msgpack.encode([500.0, [], 1]), 0.0)
    assert state.mode == "degraded"
    assert "several data-parallel ranks" in state.reason


def test_a_duplicate_batch_changes_nothing():
    engine = Engine()
    engine.store((1, 2))
    engine.store((3, 4))
    state = state_after(engine)
    for number, payload in engine.log:
        state.receive(number, payload, 0.0)
    assert state.mode == "exact"
    assert keys_in(state) == keys_of({(1, 2), (3, 4)})


def test_a_replay_that_failed_is_requested_again_later():
    engine = Engine()
    engine.store((1, 2))
    state = PublisherState(replays=True)
    state.connected(0.0)
    state.replay_from = None
    state.replay_failed("the replay socket does not answer", 3.0)
    assert (state.mode, state.reason) == ("inferred", "the replay socket does not answer")
    state.tick(3.0 + RETRY_SECS - 0.1)
    assert state.replay_from is None
    state.tick(3.0 + RETRY_SECS)
    engine.replay(state)
    assert state.mode == "exact"


def test_a_block_is_kept_until_every_medium_has_lost_it():
    engine = Engine()
    engine.store((1, 2))
    engine.store((1, 2), medium="CPU")
    state = state_after(engine)
    engine.remove(hash((None, (1, 2))))
    state.receive(*engine.log[-1], 0.0)
    assert keys_in(state) == keys_of({(1, 2)})
    removed = {"type": "BlockRemoved", "block_hashes": [hash((None, (1, 2)))], "medium": "CPU"}
    state.receive(*engine._publish(removed), 0.0)
    assert not state.blocks


@pytest.mark.parametrize("medium", ["DISK", "STORAGE", "EXTERNAL"])
def test_blocks_in_remote_media_are_ignored(medium):
    engine = Engine()
    engine.store((1, 2), medium=medium)
    assert not state_after(engine).blocks


def test_salted_blocks_and_their_successors_are_ignored():
    engine = Engine()
    engine.store((1, 2, 3, 4), salt="tenant")
    successor = {
        "type": "BlockStored", "block_hashes": [77], "token_ids": [5, 6], "block_size": 2,
        "parent_block_hash": hash(("tenant", (1, 2, 3, 4))), "medium": "GPU",
    }  # fmt: skip
    engine._publish(successor)
    state = state_after(engine)
    assert (state.mode, state.blocks.keys()) == ("exact", [])


def test_the_oldest_blocks_are_dropped_first():
    engine = Engine()
    engine.store((1, 2))
    engine.store((3, 4))
    state = state_after(engine)
    state.drop_oldest(1)
    assert keys_in(state) == keys_of({(3, 4)})


def test_a_cleared_event_counts_even_if_the_clock_of_the_engine_was_set_back():
    engine = Engine()
    state = state_after(engine, engine.store((1, 2)))
    assert state.blocks
    engine.at -= 3600.0
    state.receive(*engine.clear(), 0.0)
    assert (state.mode, len(state.blocks)) == ("exact", 0)


def test_an_endless_replay_uses_bounded_memory(monkeypatch):
    monkeypatch.setattr(tested, "MAX_HELD_BATCHES", 10)
    engine = Engine()
    state = PublisherState(replays=True)
    state.connected(0.0)
    for _ in range(1000):
        state.replayed(*engine.store((1, 2)), 0.0)
    assert len(state._digests) <= tested._DIGESTS + 10
    assert state.mode != "exact"
