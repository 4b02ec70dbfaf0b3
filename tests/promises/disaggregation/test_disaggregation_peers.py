"""The requests of each leg, compared with those of sglang-router and vllm-router.

`legs_of_peers.json` has what sglang-router 0.3.2 and vllm-router 0.1.17 sent to recording engines;
tools/record_legs.py renews it. The last test records again where SGLANG_ROUTER_PYTHON and
VLLM_ROUTER name the programs. The protocols' keys must be equal. All other bytes must be the
client's, which the other routers do not guarantee: they serialize bodies again.
"""

import json
import os
from contextlib import ExitStack, asynccontextmanager
from copy import deepcopy
from random import Random

import pytest
import trio

from tests.promises.support.clients import client_of, post
from tests.promises.support.dataplane_fixture import run_dataplane
from tools import record_legs

CONNECTORS = list(record_legs.CASES)
PEERS = json.loads(record_legs.FILE.read_text())


def expected(connector, name):
    """The legs of the peer, but with the client's limits and `stream` where the proxy keeps them:
    the peers replace them by defaults."""
    legs = deepcopy(PEERS[connector][name])
    _, fields = record_legs.CASES[connector][name]
    for role, leg in legs.items():
        if role == "decode" or connector == "sglang":
            leg |= {
                key: fields.get(key) for key in ("stream", "max_tokens", "max_completion_tokens")
            }
            legs[role] = {key: value for key, value in leg.items() if value is not None}
    return legs


@asynccontextmanager
async def proxy_before(connector):
    with ExitStack() as stack:
        both = stack.enter_context(record_legs.engines())
        entries = ""
        for role, engine in both.items():
            entries += f'[[workers]]\nurl = "{engine.url}"\nrole = "{role}"\n'
            entries += f'kv_connector = "{connector}"\n'
            if role == "prefill" and connector != "nixl":
                entries += f"bootstrap_port = {engine.port}\n"
        async with run_dataplane(config=entries, random_below=Random(1).randrange) as opened:
            yield f"http://{opened.address}", both


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_protocol_keys_are_equal_to_those_of_the_peers(connector):
    async with proxy_before(connector) as (url, both):
        recorded = await trio.to_thread.run_sync(record_legs.record, url, connector, both)
    for name, legs in recorded.items():
        assert legs == expected(connector, name), name


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_all_other_bytes_are_the_clients(connector):
    """Including unusual spacing, escapes and numbers."""
    unusual = ['"x"  :"\\u00E9"', '"y":\t{"z":[ 1.50e+1 ]}', '"x-last" : null']
    async with proxy_before(connector) as (url, both):
        for name, (path, fields) in record_legs.CASES[connector].items():
            known = {key: f'"{key}" :  {json.dumps(value)}' for key, value in fields.items()}
            inner = " ,\n".join([*known.values(), *unusual]).encode()
            for engine in both.values():
                engine.bodies.clear()
            async with client_of(url.removeprefix("http://")) as client:
                await client.send(post(b"\t{ %b\n}" % inner, path=path))
                assert (await client.answer()).status == 200
            await trio.to_thread.run_sync(record_legs.await_both, both)
            prefill, decode = (both[role].raw[-1] for role in ("prefill", "decode"))
            assert inner in decode, name
            if connector == "sglang":
                assert inner in prefill, name
            kept = [text for key, text in known.items() if key not in record_legs.KEYS]
            positions = [prefill.index(text.encode()) for text in [*kept, *unusual]]
            assert positions == sorted(positions), name


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_peers_still_send_what_was_recorded(connector):
    python, program = (os.environ.get(name) for name in ("SGLANG_ROUTER_PYTHON", "VLLM_ROUTER"))
    command = [python, "-m", "sglang_router.launch_router"] if connector == "sglang" else [program]
    if command[0] is None:
        pytest.skip("SGLANG_ROUTER_PYTHON or VLLM_ROUTER does not name the peer")
    assert record_legs.record_peer(connector, command) == PEERS[connector]
