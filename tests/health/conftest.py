import httpx
import pytest
import trio
import trio.lowlevel

from omni_proxy.upstream_http import client
from tests.health.prober_world import build_world


@pytest.fixture
def world():
    return build_world()


@pytest.fixture
def asked(monkeypatch):
    """Probes answered in memory: (time, host) of each; `asked.reply` may be changed."""
    seen = []

    class Asked(list):
        reply = staticmethod(lambda request: httpx.Response(200))
        closed = 0

    seen = Asked()

    async def answer(request):
        seen.append((trio.current_time(), request.url.host))
        reply = seen.reply(request)
        return await reply if hasattr(reply, "__await__") else reply

    class Client(httpx.AsyncClient):
        async def aclose(self):
            seen.closed += 1
            await super().aclose()

    def open_client(worker):
        return Client(transport=httpx.MockTransport(unread(answer)), timeout=None)

    monkeypatch.setattr(client, "open_client", open_client)
    return seen


def unread(answer):
    """httpx reads in-memory bodies at once; the prober wants to stream them."""

    async def streamed(request):
        response = await answer(request)
        body = response.content

        async def pieces():
            yield body

        return httpx.Response(response.status_code, content=pieces())

    return streamed
