import httpx
import pytest
import trio
import trio.lowlevel

from omni_proxy.upstream_http import client
from tests.health.prober_fixture import build_prober_fixture


@pytest.fixture
def health():
    return build_prober_fixture()


@pytest.fixture
def probes(monkeypatch):
    """In-memory responses to probes: a list of (time, host); `probes.reply` makes the response."""

    class Probes(list):
        reply = staticmethod(lambda request: httpx.Response(200))
        closed = 0

    recorded = Probes()

    async def answer(request):
        recorded.append((trio.current_time(), request.url.host))
        reply = recorded.reply(request)
        return await reply if hasattr(reply, "__await__") else reply

    class Client(httpx.AsyncClient):
        async def aclose(self):
            recorded.closed += 1
            await super().aclose()

    def open_client(worker):
        return Client(transport=httpx.MockTransport(streamed(answer)), timeout=None)

    monkeypatch.setattr(client, "open_client", open_client)
    return recorded


def streamed(answer):
    """Make the body a stream: httpx reads in-memory bodies at once, but the prober streams."""

    async def respond(request):
        response = await answer(request)
        body = response.content

        async def chunks():
            yield body

        return httpx.Response(response.status_code, content=chunks())

    return respond
