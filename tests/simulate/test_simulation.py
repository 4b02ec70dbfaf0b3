"""The proxy's own objects with modelled engines, in virtual time."""

from random import Random

import pytest

from omni_proxy.config.fields import POLICIES
from omni_proxy.config.parse import parse
from omni_proxy.routing.tree_key import HASH_BYTES, key_length
from omni_proxy.simulate.engine import EngineSpec
from omni_proxy.simulate.faults import Fault
from omni_proxy.simulate.report import summarize
from omni_proxy.simulate.simulation import Scenario, Simulation, simulated_worker
from omni_proxy.simulate.workload import WORKLOADS, OpenLoop, Request

ENGINE = EngineSpec(prefill_tokens_per_sec=1000, decode_step_ms=10, decode_step_ms_per_request=0)


def simulate(toml, workload, *, workers=2, engine=ENGINE, faults=(), seed=0):
    members = [simulated_worker(place) for place in range(workers)]
    simulation = Simulation(parse(toml), Scenario(members, workload, engine, faults, seed))
    simulation.run()
    return simulation


def steady(number, every=1.0, *, prompt=100, answer=10, **fields):
    return OpenLoop(Request(place * every, prompt, answer, **fields) for place in range(number))


def requests_sent(simulation):
    return [engine.requests for engine in simulation.engines.values()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["shared", "chats", "rollouts"])
def test_every_policy_serves_every_request_and_equal_seeds_give_equal_figures(policy, name):
    def figures():
        workload = WORKLOADS[name](120, 3, Random("w"))
        simulation = simulate(f'[routing]\npolicy = "{policy}"\n', workload, workers=3)
        return summarize(policy, {}, simulation, None)

    run = figures()
    assert (run.completed, run.failed) == (120, 0)
    assert run == figures()


def test_the_time_to_the_first_token_is_that_of_the_engine():
    simulation = simulate("", steady(3, every=10.0))
    assert simulation.outcomes.first_token_secs == pytest.approx([0.1] * 3)
    assert simulation.outcomes.total_secs == pytest.approx([0.19] * 3)
    assert requests_sent(simulation) == [2, 1]


def test_cache_aware_sends_a_prefix_to_its_holder():
    blocks = OpenLoop(Request(place * 5.0, 2048, 1, (1, 2, 3, 4)) for place in range(20))
    simulation = simulate('[routing]\npolicy = "cache_aware"\n', blocks, workers=4)
    assert sorted(requests_sent(simulation)) == [0, 0, 0, 20]
    assert summarize("", {}, simulation, None).hit_rate == pytest.approx(76 / 80)


def test_requests_of_a_dying_worker_are_retried_before_their_first_token():
    simulation = simulate(
        "", steady(20, every=0.5, prompt=2000, answer=1), faults=[Fault("die", 4.2, 0)]
    )
    outcomes = simulation.outcomes
    assert outcomes.completed == 20
    assert outcomes.retries > 0


def test_a_stream_of_a_dying_worker_fails():
    simulation = simulate("", steady(2, every=0.0, answer=1000), faults=[Fault("die", 1.0, 0)])
    assert (simulation.outcomes.completed, simulation.outcomes.failed) == (1, 1)


def test_a_dead_worker_leaves_rotation_and_gets_no_more_requests():
    simulation = simulate("", steady(100, every=0.5), faults=[Fault("die", 10.2, 0)])
    assert simulation.outcomes.completed == 100
    assert (
        requests_sent(simulation)[0] == 11
    )  # one each second until it died; refused connections do not count
    assert 0 < simulation.outcomes.retries <= 3  # max_worker_retries in a row eject it


def test_a_worker_that_joins_gets_requests():
    simulation = simulate("", steady(100, every=0.5), faults=[Fault("join", 10.0)])
    assert len(requests_sent(simulation)) == 3
    assert requests_sent(simulation)[2] > 20


def test_an_evicted_cache_is_computed_again():
    def hits(*faults):
        blocks = OpenLoop(Request(place * 5.0, 1024, 1, (1, 2)) for place in range(4))
        simulation = simulate("", blocks, workers=1, faults=faults)
        return summarize("", {}, simulation, None).hit_rate

    assert hits() == pytest.approx(6 / 8)
    assert hits(Fault("evict", 7.0, 0)) == pytest.approx(4 / 8)


def test_least_request_sends_fewer_requests_to_a_slow_worker():
    workload = steady(200, every=0.1, answer=20)
    simulation = simulate(
        '[routing]\npolicy = "least_request"\n', workload, faults=[Fault("slow", 0.0, 0, 8.0)]
    )
    assert requests_sent(simulation)[0] * 3 < requests_sent(simulation)[1]


def test_a_full_fleet_refuses_without_a_queue_and_serves_all_with_one():
    def outcomes(queue):
        toml = f"[server]\nmax_inflight = 2\nqueue_size = {queue}\nqueue_timeout_secs = 60.0\n"
        return simulate(toml, steady(10, every=0.0, answer=50)).outcomes

    assert (outcomes(0).completed, outcomes(0).failed) == (2, 8)
    assert (outcomes(8).completed, outcomes(8).failed) == (10, 0)


def test_a_wait_in_the_queue_ends_with_its_timeout():
    toml = "[server]\nmax_inflight = 1\nqueue_size = 9\nqueue_timeout_secs = 0.5\n"
    simulation = simulate(toml, steady(2, every=0.0, prompt=1000, answer=100))
    assert (simulation.outcomes.completed, simulation.outcomes.failed) == (1, 1)


def test_the_response_head_timeout_is_enforced():
    toml = "[server.timeouts]\nresponse_head_secs = 2.0\n"
    simulation = simulate(toml, steady(1, prompt=5000))
    assert (simulation.outcomes.completed, simulation.outcomes.failed) == (0, 1)
    assert simulation.time.now == pytest.approx(2.0)
    assert all(engine.in_flight == 0 for engine in simulation.engines.values())


def test_sessions_stay_at_their_worker():
    toml = '[routing]\npolicy = "round_robin"\nsticky_sessions = true\n'
    workload = OpenLoop(
        Request(place * 1.0, 100, 1, session=f"s{place % 3}") for place in range(30)
    )
    assert sorted(requests_sent(simulate(toml, workload, workers=3))) == [10, 10, 10]


def test_a_request_beyond_the_kv_memory_fails_and_is_not_retried():
    simulation = simulate("", steady(1, prompt=1000), engine=EngineSpec(kv_tokens=500))
    assert (simulation.outcomes.completed, simulation.outcomes.failed) == (0, 1)
    assert simulation.outcomes.retries == 0


@pytest.mark.parametrize(("feedback", "corrections"), [("true", 1), ("false", 0)])
def test_the_policy_corrects_itself_by_cached_tokens_that_engines_report(feedback, corrections):
    """An engine loses its cache between the second and the third prompt."""
    prompts = [(1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 3, 6)]
    workload = OpenLoop(
        Request(place * 20.0, 512 * len(blocks), 1, blocks) for place, blocks in enumerate(prompts)
    )
    toml = f'[routing]\npolicy = "cache_aware"\n[routing.cache_aware]\nfeedback = {feedback}\n'
    simulation = simulate(toml, workload, workers=1, faults=[Fault("evict", 30.0, 0)])
    policy = simulation.services.balancer.policy
    assert policy.stats()["corrections"] == corrections
    (held,) = policy.stats()["tree_size_by_worker"].values()
    blocks_in_key = [key_length(4 * 512 * count) for count in range(6)]
    third = blocks_in_key[4]
    branch = (
        blocks_in_key[5] - blocks_in_key[3]
    )  # of the first two prompts, not shared with the third
    assert held - branch * (not corrections) == pytest.approx(third, abs=2 * HASH_BYTES)


@pytest.mark.parametrize(
    ("bound", "poll_secs", "spares"), [(1, 0.1, True), (1, 0, False), (0, 0.1, False)]
)
def test_requests_avoid_an_engine_once_it_has_reported_a_long_queue(bound, poll_secs, spares):
    toml = f"[routing]\noverload_waiting = {bound}\nload_poll_secs = {poll_secs}\n"
    engine = EngineSpec(prefill_tokens_per_sec=1000, decode_step_ms=10, max_batch=2)
    workload = steady(100, every=0.3, answer=20)
    simulation = simulate(toml, workload, engine=engine, faults=[Fault("slow", 0.0, 0, 8.0)])
    slow, quick = requests_sent(simulation)
    assert (slow * 2 < quick) is spares
    assert simulation.outcomes.completed == 100
