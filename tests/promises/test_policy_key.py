"""A policy that keeps clients apart is told by what; one that does not costs nothing for it."""

import pytest

from tests.promises.clients import post
from tests.promises.dataplane_fixture import dataplane_before
from tests.promises.fakes import answering, counted


@pytest.mark.parametrize(("wants", "reported"), [(True, "anna"), (False, "")])
async def test_the_key_is_read_from_where_the_policy_configures_it(wants, reported):
    async with dataplane_before(answering(counted(b"good"))) as (opened, client):
        keys = []

        class Keyed(type(opened.dataplane.policy)):
            needs_affinity_key = wants

            def pick(self, candidates, need):
                keys.append(need.affinity_key)
                return super().pick(candidates, need)

        opened.dataplane.balancer.policy = Keyed()
        await client.send(post(b'{"messages": []}', "X-Session-Id: anna"))
        assert (await client.answer()).status == 200
        assert keys == [reported]
