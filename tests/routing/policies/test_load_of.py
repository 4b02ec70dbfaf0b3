"""Every policy compares the sum of a worker's requests in flight and its cluster offset.

How a load is divided between the two makes no difference to a pick.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.fields import POLICIES
from omni_proxy.config.schema import CacheAwareConfig
from tests.routing.policies.chats import build, chat, weighted

SETTINGS = {
    "no sessions": {},
    "sessions that move": {"sticky_sessions": True, "sticky_rebalance_abs": 3},
    "few sessions": {
        "sticky_sessions": True,
        "sticky_load": "sessions",
        "sticky_rebalance_abs": 3,
    },
}
PROMPTS = ("a" * 400, "b" * 400, "a" * 200 + "c" * 200)


def picks(name, settings, weights, loads, prompts, offsets):
    """The indexes of the picked workers. `loads` has, for each pick, the load of each worker."""
    policy = build(
        name,
        below=random.Random(4).randrange,
        cache_aware=CacheAwareConfig(balance_abs_threshold=2, balance_rel_threshold=1.1),
        **SETTINGS[settings],
    )
    fleet, picked = weighted(*weights), []
    for number, (prompt, worker_loads) in enumerate(zip(prompts, loads, strict=True)):
        for worker, load, offset in zip(fleet, worker_loads, offsets, strict=True):
            worker.in_flight, worker.load_offset = load + offset, -offset
        request = chat(PROMPTS[prompt], key=f"{prompt}")
        picked.append(fleet.index(policy.pick(fleet, request)))
        if not number % 3:
            policy.preview_pick(fleet, request)
    return picked


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", POLICIES)
@given(st.data())
def test_the_division_of_a_load_does_not_affect_picks(name, settings, data):
    count = data.draw(st.integers(2, 5))
    values = st.lists(st.integers(0, 12), min_size=count, max_size=count)
    weights = data.draw(st.lists(st.sampled_from([1, 1, 2]), min_size=count, max_size=count))
    loads = data.draw(st.lists(values, min_size=1, max_size=12))
    prompts = [data.draw(st.integers(0, len(PROMPTS) - 1)) for _ in loads]
    offsets = data.draw(values)
    no_offsets = [0] * count
    assert picks(name, settings, weights, loads, prompts, offsets) == picks(
        name, settings, weights, loads, prompts, no_offsets
    )
