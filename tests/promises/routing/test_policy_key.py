"""The affinity key is computed only for policies that need it."""

import pytest

from tests.promises.support.clients import post
from tests.promises.support.dataplane_fixture import dataplane_and_client
from tests.promises.support.fakes import answering, counted


@pytest.mark.parametrize(("needed", "key"), [(True, "anna"), (False, "")])
async def test_a_policy_gets_an_affinity_key_only_if_it_needs_one(needed, key):
    async with dataplane_and_client(answering(counted(b"good"))) as (opened, client):
        keys = []

        class Keyed(type(opened.dataplane.policy)):
            needs_affinity_key = needed

            def pick(self, candidates, need):
                keys.append(need.affinity_key)
                return super().pick(candidates, need)

        opened.dataplane.balancer.use_policy(Keyed())
        await client.send(post(b'{"messages": []}', "X-Session-Id: anna"))
        assert (await client.answer()).status == 200
        assert keys == [key]
