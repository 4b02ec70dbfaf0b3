"""Hostile gRPC streams and requests through Envoy leave nothing counted in the picker."""

import asyncio  # noqa: TID251  gRPC's client runs on it

import grpc
import pytest
import trio

from omni_proxy.picker.ext_proc.grpc_server import SERVICE
from omni_proxy.picker.ext_proc.protocol import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProtocolConfiguration,
)
from tests.promises.support.envoy_program import DUPLEX, idle, needs_envoy, picked
from tests.promises.support.fleet_program import chat

pytestmark = needs_envoy
FIELDS = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
STREAMS = 100


def head(*, end: bool) -> bytes:
    fields = [HeaderValue(key=name, raw_value=text.encode()) for name, text in FIELDS.items()]
    modes = ProtocolConfiguration(
        request_body_mode=ProcessingMode.BUFFERED, response_body_mode=ProcessingMode.STREAMED
    )
    return ProcessingRequest(
        request_headers=HttpHeaders(headers=HeaderMap(headers=fields), end_of_stream=end),
        protocol_config=modes,
    ).SerializeToString()


def body(text: bytes) -> bytes:
    return ProcessingRequest(
        request_body=HttpBody(body=text, end_of_stream=True)
    ).SerializeToString()


PICKED = [head(end=False), body(b'{"prompt": "x"}')]


async def _stream(port: int, messages: list[bytes], responses: int) -> str:
    """The status of a stream that the picker ends, or "" after reading `responses` messages."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(f"/{SERVICE}/Process")()
        for message in messages:
            await call.write(message)
        try:
            for _ in range(responses):
                if await call.read() == grpc.aio.EOF:
                    return (await call.code()).name
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return ""


async def streams(port: int, messages: list[bytes], responses: int, count: int = 1) -> set[str]:
    async def together() -> list[str]:
        return await asyncio.gather(*(_stream(port, messages, responses) for _ in range(count)))

    return set(await trio.to_thread.run_sync(lambda: asyncio.run(together())))


async def test_broken_and_abandoned_streams_leave_nothing_counted(tmp_path):
    async with picked(tmp_path) as here:
        port = here.at.grpc
        assert await streams(port, [b"\xff\xff\xff"], 1) == {"INVALID_ARGUMENT"}
        assert await streams(port, [*PICKED, head(end=True)], 3) == {"INVALID_ARGUMENT"}
        assert await streams(port, [body(b"{}")], 1) == {"INVALID_ARGUMENT"}
        assert await streams(port, PICKED, 2, STREAMS) == {""}
        assert await streams(port, PICKED[:1], 0, STREAMS) == {""}
        await idle(here.picker)
        assert (await here.client.post("/v1/chat/completions", json=chat())).status_code == 200


@pytest.mark.parametrize("changes", [(), DUPLEX], ids=["buffered", "duplex"])
async def test_a_body_above_the_bound_and_a_client_that_cuts_its_body(tmp_path, changes):
    async with picked(tmp_path, changes=changes, more="max_payload_size = 1048576") as here:
        answer = await here.client.post("/v1/chat/completions", json=chat("x" * 3_000_000))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
        stream = await trio.open_tcp_stream("127.0.0.1", here.at.envoy)
        async with stream:
            await stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"
            )
            await here.picker.until("/status", lambda body: body["picker"]["streams"] == 1)
        await idle(here.picker)
        assert sum(worker.requests for worker in here.fleet) == 0
