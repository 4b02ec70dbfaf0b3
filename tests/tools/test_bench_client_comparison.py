"""The comparison with another client sends the same requests with both and measures the same."""

import json

import httpx
import trio

from omni_proxy.simulate.traces import read_trace
from omni_proxy.upstream_http.event_stream import EventStreamReader, read_chunk
from tools.bench.client_comparison import StreamingEngine, write_trace


def test_both_clients_get_requests_of_the_same_times_and_sizes(tmp_path):
    our_trace, their_trace = write_trace(tmp_path, 30, 4.0)
    our_requests = list(read_trace(our_trace).requests)
    their_requests = [json.loads(line) for line in their_trace.read_text().splitlines()]
    assert [round(1000 * each.at) for each in our_requests] == [
        each["timestamp"] for each in their_requests
    ]
    assert [each.output_tokens for each in our_requests] == [
        each["output_length"] for each in their_requests
    ]
    assert [each.input_tokens for each in our_requests] == [
        len(each["text_input"].split()) for each in their_requests
    ]


async def test_the_worker_streams_as_many_tokens_as_requested(autojump_clock):
    engine = StreamingEngine()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.serve)
        body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3, "stream": True}
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://127.0.0.1:{engine.port}/v1/chat/completions"
            response = await client.post(url, json=body)
        chunks = [read_chunk(data) for data in EventStreamReader().feed(response.content)]
        assert sum(chunk.generated for chunk in chunks) == 3
        assert [chunk.usage.output for chunk in chunks if chunk.usage] == [3]
        assert chunks[-1].finished
        nursery.cancel_scope.cancel()
