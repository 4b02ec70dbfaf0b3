"""What each leg gets from us, beside what it gets from sglang-router and vllm-router.

`legs_of_peers.json` has what sglang-router 0.3.2 and vllm-router 0.1.17 sent to recording engines;
tools/record_legs.py renews it, and the last test does so where SGLANG_ROUTER_PYTHON and VLLM_ROUTER
name the peers. The keys of the protocols are theirs. All other bytes are the client's, which is
more than they do: they write bodies anew.
"""

import json
import os
from contextlib import ExitStack, asynccontextmanager
from copy import deepcopy
from random import Random

import pytest
import trio

from tests.promises.clients import client_of, post
from tests.promises.dataplane_fixture import run_dataplane
from tools import record_legs

CONNECTORS = list(record_legs.CASES)
PEERS = json.loads(record_legs.FILE.read_text())


def expected(connector, name):
    """As the peer sends it, with the limits and `stream` as the client has them where they are the
    client's: the peers write them anew, with defaults."""
    legs = deepcopy(PEERS[connector][name])
    _, asked = record_legs.CASES[connector][name]
    for role, leg in legs.items():
        if role == "decode" or connector == "sglang":
            leg |= {
                key: asked.get(key) for key in ("stream", "max_tokens", "max_completion_tokens")
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
async def test_the_keys_of_the_protocols_are_those_of_the_peers(connector):
    async with proxy_before(connector) as (url, both):
        ours = await trio.to_thread.run_sync(record_legs.record, url, connector, both)
    for name, legs in ours.items():
        assert legs == expected(connector, name), name


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_all_other_bytes_are_the_clients(connector):
    """Odd spacing, escapes and numbers included."""
    odd = ['"x"  :"\\u00E9"', '"y":\t{"z":[ 1.50e+1 ]}', '"x-last" : null']
    async with proxy_before(connector) as (url, both):
        for name, (path, asked) in record_legs.CASES[connector].items():
            known = {key: f'"{key}" :  {json.dumps(value)}' for key, value in asked.items()}
            inner = " ,\n".join([*known.values(), *odd]).encode()
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
            places = [prefill.index(text.encode()) for text in [*kept, *odd]]
            assert places == sorted(places), name


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_peers_still_send_what_was_recorded(connector):
    python, program = (os.environ.get(name) for name in ("SGLANG_ROUTER_PYTHON", "VLLM_ROUTER"))
    words = [python, "-m", "sglang_router.launch_router"] if connector == "sglang" else [program]
    if words[0] is None:
        pytest.skip("SGLANG_ROUTER_PYTHON or VLLM_ROUTER does not name the peer")
    assert record_legs.record_peer(connector, words) == PEERS[connector]
