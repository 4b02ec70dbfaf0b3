"""KV events of modelled engines: what reaches the index, what is lost, and what is done then."""

import json
from random import Random

import pytest

from omni_proxy.config.overlay import SavedState, desired_workers
from omni_proxy.config.parse import parse
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.simulate.engine import EngineSpec
from omni_proxy.simulate.faults import Fault
from omni_proxy.simulate.kv_feed import DELAY_SECS, SPELLED_TOKENS, KvFeed, Loss, token_prompt
from omni_proxy.simulate.report import summarize
from omni_proxy.simulate.simulation import Scenario, Simulation, simulated_worker
from omni_proxy.simulate.virtual_time import VirtualTime
from omni_proxy.simulate.workload import WORKLOADS, Request
from tests.routing.kv_events.published import blocks_of

EVENTS = '[routing]\npolicy = "cache_aware"\n[routing.cache_aware]\nsource = "events"\n'
TIGHT = EngineSpec(kv_tokens=40_000)  # of each worker: several prompts


def simulation(
    *, requests=100, workers=3, engine=TIGHT, faults=(), toml=EVENTS, seed=0, members=None
):
    members = members or [simulated_worker(place) for place in range(workers)]
    workload = WORKLOADS["agents"](requests, workers, Random("w"))
    return Simulation(parse(toml), Scenario(members, workload, engine, faults, seed))


def chain_of(blocks):
    """As the proxy knows a chain of blocks."""
    request = Request(0.0, 512 * len(blocks), 1, tuple(blocks))
    return blocks_of(json.loads(token_prompt(request, 0)), SPELLED_TOKENS)


def believed(simulation, url):
    return set(simulation.feeds[url].state.blocks)


def held(simulation, url):
    """Without those that are too short to be published."""
    blocks = simulation.engines[url]._cache._blocks
    return {name for name, block in blocks.items() if block.tokens >= SPELLED_TOKENS}


def settle(simulation):
    """Until everything that was published has arrived."""
    until = simulation.time.now + 10 * DELAY_SECS
    while simulation.time.now < until:
        simulation.time.advance()


def test_nothing_is_believed_beyond_the_delay_that_the_engine_does_not_hold():
    run = simulation(faults=[Fault("evict", 20.0, 0), Fault("evict", 30.0, 1)])
    gone = {url: {} for url in run.feeds}  # when each block was dropped last
    late = 0

    def compare(_):
        nonlocal late
        now = run.time.now
        for url, dropped in gone.items():
            too_many = believed(run, url) - held(run, url)
            late += len(too_many)
            assert all(dropped[block] >= now - DELAY_SECS for block in too_many)
            assert run.blocks.count(url) == len(believed(run, url))

    def follow(url, feed):
        removed = feed.removed

        def note(block):
            gone[url][block] = run.time.now
            removed(block)
            for wait in (0.0, 1.5):
                run.time.schedule(run.time.now + wait * DELAY_SECS, compare, None)

        feed.removed = note

    for url, feed in run.feeds.items():
        follow(url, feed)
    assert run.run().completed == 100
    assert late > 100  # within the delay: the test would see what is not taken back


def test_in_the_end_the_index_has_what_the_engines_have():
    run = simulation()
    run.run()
    settle(run)
    for url in run.feeds:
        assert run.blocks.is_exact(url)
        assert believed(run, url) == held(run, url)
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
    assert index.match(chain_of(request.blocks), among, 0.0)[0] == 4  # five tokens are no block
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
    assert one[4097:4101] != other[4097:4101]  # from the first token on
    assert prompt(700, 1, 2)[:2049] == one[:2049]
    assert prompt(5, 0) == b"[100,100,100,100,100]"
    assert prompt(700, number=1) != prompt(700, number=2)


def gap_is_noticed(run, url):
    """After losses every batch arrives; the next one shows the gap."""
    run.feeds[url]._loss = Loss(0.0, Random(0))
    run.engines[url].evict()
    settle(run)


def test_lost_events_are_asked_for_again():
    run = simulation(faults=[Fault("lose_events", 0.0, share=0.1)])
    assert run.run().completed == 100
    assert any(feed.lost for feed in run.feeds.values())
    for url, feed in run.feeds.items():
        gap_is_noticed(run, url)
        assert feed.state.mode == "exact"
        assert believed(run, url) == held(run, url)


def test_without_a_replay_socket_a_worker_whose_events_were_lost_is_not_believed():
    url = simulated_worker(0).url
    toml = f'{EVENTS}[[workers]]\nurl = "{url}"\nkv_events = "tcp://10.0.0.1:5557"\n'
    named = next(iter(desired_workers(parse(toml), (), SavedState())))
    run = simulation(
        members=[named, simulated_worker(1)], faults=[Fault("lose_events", 0.0, share=0.1)]
    )
    assert set(run.feeds) == {url}  # the other one is said to publish nothing
    assert run.run().completed == 100
    assert run.feeds[url].state.mode == "degraded"
    assert believed(run, url) == set()


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_equal_seeds_give_equal_figures(share):
    def figures(seed):
        faults = [Fault("lose_events", 0.0, share=share), Fault("die", 20.0, 0)]
        run = simulation(faults=[*faults, Fault("join", 25.0)], seed=seed)
        run.run()
        return summarize("", {}, run, None), [feed.lost for feed in run.feeds.values()]

    assert figures(3) == figures(3)
    assert share == 0.0 or figures(3)[1] != figures(4)[1]


def test_a_dead_engine_is_not_believed():
    run = simulation(faults=[Fault("die", 20.0, 0)])
    run.run()
    settle(run)
    dead, *others = run.feeds
    assert not run.blocks.is_exact(dead)
    assert all(run.blocks.is_exact(url) for url in others)


def test_slots_and_other_sources_publish_nothing():
    assert simulation(engine=EngineSpec(slots=4)).feeds == {}
    assert simulation(toml='[routing]\npolicy = "cache_aware"\n').feeds == {}
