"""KV events of modelled engines: how they reach the index, and what happens after losses."""

import json
from random import Random

import pytest

from omni_proxy.config.overlay import SavedState, desired_workers
from omni_proxy.config.parse import parse
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.simulate.engine import EngineSpec
from omni_proxy.simulate.faults import Fault
from omni_proxy.simulate.kv_feed import BLOCK_IDS, DELAY_SECS, KvFeed, Loss, token_prompt
from omni_proxy.simulate.report import summarize
from omni_proxy.simulate.simulation import Scenario, Simulation, simulated_worker
from omni_proxy.simulate.virtual_time import VirtualTime
from omni_proxy.simulate.workload import WORKLOADS, Request
from tests.routing.kv_events.published import blocks_of

EVENTS = '[routing]\npolicy = "cache_aware"\n[routing.cache_aware]\nsource = "events"\n'
TIGHT = EngineSpec(kv_tokens=40_000)  # for each worker: room for several prompts


def simulation(
    *, requests=100, workers=3, engine=TIGHT, faults=(), toml=EVENTS, seed=0, members=None
):
    members = members or [simulated_worker(place) for place in range(workers)]
    workload = WORKLOADS["agents"](requests, workers, Random("w"))
    return Simulation(parse(toml), Scenario(members, workload, engine, faults, seed))


def chain_of(blocks):
    """A chain of blocks as the proxy identifies it."""
    request = Request(0.0, 512 * len(blocks), 1, tuple(blocks))
    return blocks_of(json.loads(token_prompt(request, 0)), BLOCK_IDS)


def indexed(simulation, url):
    return set(simulation.feeds[url].state.blocks)


def held(simulation, url):
    """The engine's blocks, without those that are too short to be published."""
    blocks = simulation.engines[url].cached_blocks
    return {name for name, tokens in blocks.items() if tokens >= BLOCK_IDS}


def settle(simulation):
    """Advances time until all published events have arrived."""
    until = simulation.time.now + 10 * DELAY_SECS
    while simulation.time.now < until:
        simulation.time.advance()


def test_the_index_is_behind_the_engine_by_at_most_the_delay():
    run = simulation(faults=[Fault("evict", 20.0, 0), Fault("evict", 30.0, 1)])
    drop_times = {url: {} for url in run.feeds}  # when each block was last dropped
    stale_count = 0

    def compare(_):
        nonlocal stale_count
        now = run.time.now
        for url, times in drop_times.items():
            stale = indexed(run, url) - held(run, url)
            stale_count += len(stale)
            assert all(times[block] >= now - DELAY_SECS for block in stale)
            assert run.blocks.count(url) == len(indexed(run, url))

    def follow(url, feed):
        removed = feed.removed

        def note(block):
            drop_times[url][block] = run.time.now
            removed(block)
            for wait in (0.0, 1.5):
                run.time.schedule(run.time.now + wait * DELAY_SECS, compare, None)

        feed.removed = note

    for url, feed in run.feeds.items():
        follow(url, feed)
    assert run.run().completed == 100
    assert stale_count > 100  # within the delay; so the test does observe stale blocks


def test_at_the_end_the_index_equals_the_caches():
    run = simulation()
    run.run()
    settle(run)
    for url in run.feeds:
        assert run.blocks.is_exact(url)
        assert indexed(run, url) == held(run, url)
    assert run.blocks.blocks > 0


def test_the_index_finds_a_prompt_by_its_tokens():
    time, index = VirtualTime(), BlockIndex()
    feed = KvFeed("w", time, index, Loss(0.0, Random(0)), replays=False)
    request = Request(0.0, 2048 + 5, 1, (7, 8, 9, 1 << 63, 11))
    for place in range(5):
        feed.stored(request, place)
    feed.publish()
    assert not index.has_exact
    while time.advance():
        pass
    assert time.now == DELAY_SECS
    among = index.bit_of("w")
    assert (
        index.match(chain_of(request.blocks), among, 0.0)[0] == 4
    )  # the last five tokens are not a full block
    assert index.match(chain_of((7, 8, 3)), among, 0.0)[0] == 2
    feed.removed(9)
    feed.publish()
    time.advance()
    assert index.match(chain_of(request.blocks), among, 0.0)[0] == 2
    feed.cleared()
    feed.publish()
    time.advance()
    assert index.match(chain_of(request.blocks), index.bit_of("w"), 0.0)[0] == 0


def test_prompts_share_leading_bytes_exactly_where_they_share_blocks():
    def prompt(tokens, *blocks, number=0):
        return token_prompt(Request(0.0, tokens, 1, blocks), number)

    one, other = prompt(1536, 1, 2, 3), prompt(1536, 1, 2, 4)
    assert one[:4097] == other[:4097]
    assert one[4097:4101] != other[4097:4101]  # they differ from the first token of the block
    assert prompt(700, 1, 2)[:2049] == one[:2049]
    assert prompt(5, 0) == b"[100,100,100,100,100]"
    assert prompt(700, number=1) != prompt(700, number=2)


def reveal_gap(run, url):
    """Empties the engine's cache, and publishes that until a batch arrives, which reveals gaps."""
    run.engines[url].evict()
    feed, lost = run.feeds[url], -1
    while feed.lost != lost:
        lost = feed.lost
        feed.cleared()
        feed.publish()
    settle(run)


def test_lost_events_are_replayed():
    run = simulation(faults=[Fault("lose_events", 0.0, share=0.1)])
    assert run.run().completed == 100
    assert any(feed.lost for feed in run.feeds.values())
    for url, feed in run.feeds.items():
        reveal_gap(run, url)
        assert feed.state.mode == "exact"
        assert indexed(run, url) == held(run, url)


def test_without_a_replay_socket_a_worker_with_lost_events_is_degraded():
    url = simulated_worker(0).url
    toml = f'{EVENTS}[[workers]]\nurl = "{url}"\nkv_events = "tcp://10.0.0.1:5557"\n'
    named = next(iter(desired_workers(parse(toml), (), SavedState())))
    run = simulation(
        members=[named, simulated_worker(1)], faults=[Fault("lose_events", 0.0, share=0.1)]
    )
    assert set(run.feeds) == {url}  # the other worker is configured to publish nothing
    assert run.run().completed == 100
    assert run.feeds[url].state.mode == "degraded"
    assert indexed(run, url) == set()


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_equal_seeds_give_equal_figures(share):
    def figures(seed):
        faults = [Fault("lose_events", 0.0, share=share), Fault("die", 20.0, 0)]
        run = simulation(faults=[*faults, Fault("join", 25.0)], seed=seed)
        run.run()
        return summarize("", {}, run, None), [feed.lost for feed in run.feeds.values()]

    assert figures(3) == figures(3)
    assert share == 0.0 or figures(3)[1] != figures(4)[1]


def test_a_dead_engine_is_not_exact():
    run = simulation(faults=[Fault("die", 20.0, 0)])
    run.run()
    settle(run)
    dead, *others = run.feeds
    assert not run.blocks.is_exact(dead)
    assert all(run.blocks.is_exact(url) for url in others)


def test_engines_with_slots_and_other_sources_publish_no_events():
    assert simulation(engine=EngineSpec(slots=4)).feeds == {}
    assert simulation(toml='[routing]\npolicy = "cache_aware"\n').feeds == {}
