"""Connections to the API server: inside and outside a cluster, with rotated tokens and with TLS."""

import ssl
from functools import partial

import pytest
import trio

from omni_proxy.config.parse import parse
from omni_proxy.discovery_watch.api_connection import ApiError, ClusterAccess, get
from tests.discovery_watch.api_server import ApiServer
from tests.promises.support.tls_helpers import AUTHORITY, FILES, server_context


@pytest.fixture
def account(tmp_path):
    for name, text in (
        ("token", "first\n"),
        ("namespace", "models"),
        ("ca.crt", AUTHORITY.read_text()),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def entry(text=""):
    return parse(f"[[discover]]\n{text}").discover[0]


def in_cluster(account, **environ):
    return ClusterAccess(entry(), environ, account)


def test_inside_a_cluster_the_service_account_has_all_settings(account):
    access = in_cluster(
        account, KUBERNETES_SERVICE_HOST="10.96.0.1", KUBERNETES_SERVICE_PORT="6443"
    )
    endpoint = access.endpoint()
    assert (endpoint.url, endpoint.token) == ("https://10.96.0.1:6443", "first")
    assert endpoint.context is not None
    assert (endpoint.context.verify_mode, endpoint.context.check_hostname) == (
        ssl.CERT_REQUIRED,
        True,
    )
    assert access.namespace() == "models"


def test_a_token_is_read_for_each_request(account):
    access = in_cluster(account, KUBERNETES_SERVICE_HOST="fd00::1")
    assert access.endpoint().url == "https://[fd00::1]:443"
    (account / "token").write_text("second")
    assert access.endpoint().token == "second"


def test_outside_a_cluster_the_error_names_the_missing_setting(account):
    with pytest.raises(ApiError, match="name api_server"):
        in_cluster(account).endpoint()


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"\xff"])
def test_the_error_for_an_invalid_token_does_not_show_it(account, content):
    (account / "token").write_bytes(content)
    with pytest.raises(ApiError, match="token") as error:
        in_cluster(account, KUBERNETES_SERVICE_HOST="h").endpoint()
    assert "lines" not in str(error.value)


def test_the_error_for_a_missing_file_names_it(tmp_path):
    table = f'api_server = "https://h"\nnamespace = "n"\nca_file = "{tmp_path}/ca"'
    with pytest.raises(ApiError, match="ca cannot be read: No such file"):
        ClusterAccess(entry(table)).endpoint()


LIST = "/api/v1/namespaces/n/pods"


async def request(server, table):
    """The status of a request with this table, and the credentials that the server received."""
    text = f'api_server = "{server.url}"\nnamespace = "n"\n{table}'
    response = await get(ClusterAccess(entry(text)).endpoint(), LIST, {})
    await response.close()
    return response.status, server.requests[-1][2].get("authorization")


async def serving(nursery, context=None, token=""):
    server = ApiServer(context, token)
    await nursery.start(server.serve)
    return server


async def test_each_request_has_the_token_and_a_wrong_one_is_refused(nursery, tmp_path):
    server = await serving(nursery, token="right")
    (tmp_path / "token").write_text("right")
    table = f'token_file = "{tmp_path}/token"'
    assert await request(server, table) == (200, "Bearer right")
    (tmp_path / "token").write_text("wrong")
    assert await request(server, table) == (401, "Bearer wrong")
    assert await request(server, "") == (401, None)


async def test_the_certificate_of_the_server_is_verified(nursery):
    server = await serving(nursery, server_context())
    assert (await request(server, f'ca_file = "{AUTHORITY}"'))[0] == 200
    for table in ("", f'ca_file = "{FILES}/stranger.pem"'):
        with pytest.raises(ApiError, match="certificate verify failed"):
            await request(server, table)


async def test_a_certificate_for_another_name_is_refused(nursery):
    server = await serving(nursery, server_context("elsewhere"))
    with pytest.raises(ApiError, match="certificate verify failed"):
        await request(server, f'ca_file = "{AUTHORITY}"')


async def test_the_proxy_sends_its_client_certificate_if_it_has_one(nursery):
    context = server_context()
    context.load_verify_locations(AUTHORITY)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await serving(nursery, context)
    table = f'ca_file = "{AUTHORITY}"\n'
    own = f'client_cert = "{FILES}/client.pem"\nclient_key = "{FILES}/client-key.pem"'
    assert (await request(server, table + own))[0] == 200
    with pytest.raises(ApiError):
        await request(server, table)


async def read_whole(access):
    response = await get(access.endpoint(), LIST, {})
    try:
        while await response.read(10):
            pass
    finally:
        await response.close()


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"SSH-2.0\r\n\r\n", "not HTTP"),
        (b"", "the connection was closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", "the connection was closed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", "was closed"),
    ],
)
async def test_a_truncated_response_is_an_error(nursery, response, reason):
    async def serve(stream):
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(response)

    (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    access = ClusterAccess(entry(f'api_server = "{url}"\nnamespace = "n"'))
    with pytest.raises(ApiError, match=reason):
        await read_whole(access)


async def test_a_body_without_a_length_ends_with_the_connection(nursery):
    async def serve(stream):
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\nab")

    (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    access = ClusterAccess(entry(f'api_server = "{url}"\nnamespace = "n"'))
    response = await get(access.endpoint(), LIST, {})
    assert [await response.read(10), await response.read(10)] == [b"ab", b""]
    await response.close()
