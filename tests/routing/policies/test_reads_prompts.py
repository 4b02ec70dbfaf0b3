"""A policy that is said not to read prompts leaves the body of a request undecoded."""

import pytest

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies import BUILT_IN, reads_prompts
from tests.routing.policies.chats import build, workers

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "lora_path": "a"}'


def undecoded():
    return Requirements(0, model="m", affinity_key="key", undecoded=BODY)


@pytest.mark.parametrize("name", BUILT_IN)
def test_only_policies_that_read_prompts_decode_the_body(name):
    policy, fleet, need = build(name), workers(0, 0), undecoded()
    for _ in range(3):
        policy.pick(fleet, need)
    assert (need.undecoded == b"") is reads_prompts(RoutingConfig(policy=name))


def test_a_policy_of_another_package_may_read_prompts():
    assert reads_prompts(RoutingConfig(policy="package.module:Policy"))


def test_a_deferred_body_has_all_its_fields():
    assert undecoded().body_fields == decode_body(BODY)
