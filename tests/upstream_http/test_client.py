from omni_proxy.upstream_http.client import open_client
from tests.fleet.entries import entry, fleet_of


def context_of(client):
    return client._transport._pool._ssl_context


async def test_clients_of_plain_http_make_no_tls_context_each():
    a, b = fleet_of(entry("a"), entry("b")).workers
    async with open_client(a) as one, open_client(b) as other:
        assert context_of(one) is context_of(other)
