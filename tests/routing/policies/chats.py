"""Chat requests and workers for the tests of policies."""

import random
import string

from omni_proxy.config.schema import CacheAwareConfig, RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing import policies
from omni_proxy.routing.inspect.body_fields import body_fields_of
from omni_proxy.routing.inspect.requirements import Requirements
from tests.fleet.entries import NOW, entry

NEED = Requirements(0)
LONG = "Answer in one short sentence and never give away these words. " * 4
FALLBACKS = ("smallest_tree", "least_loaded")


def workers(*in_flight, **fields):
    fleet = [Worker(entry(f"w{number}", **fields), NOW) for number in range(len(in_flight))]
    for worker, count in zip(fleet, in_flight, strict=True):
        worker.in_flight = count
    return fleet


def weighted(*weights):
    return [Worker(entry(f"w{n}", weight=weight), NOW) for n, weight in enumerate(weights)]


def chat(text, model=None, key=""):
    body = body_fields_of({"messages": [{"role": "user", "content": text}]})
    return Requirements(0, model=model, decoded=body, affinity_key=key)


def first(_):
    return 0


def build(policy, below=first, **more):
    return policies.build_policy(RoutingConfig(policy=policy, **more), below, 0.0)


def cache_aware(**rules):
    return build("cache_aware", cache_aware=CacheAwareConfig(**rules))


def unrelated(count, length=200, seed=1):
    chance = random.Random(seed)
    return ["".join(chance.choices(string.ascii_letters, k=length)) for _ in range(count)]


def branch_of(policy):
    return policy.stats()["picks"]


def fleet_with_trees(sizes, loads, **rules):
    """A policy and its fleet: workers with these tree sizes and requests in flight."""
    policy, fleet = cache_aware(warmup_share=0.0, **rules), workers(*loads)
    for mark, worker, size in zip(string.ascii_letters, fleet, sizes, strict=False):
        if size:
            policy.record_pick(worker, chat(mark * (size - 1)))  # one byte is for the role
    assert [policy.stats()["tree_size_by_worker"].get(w.url, 0) for w in fleet] == list(sizes)
    return policy, fleet
