import socket

import pytest

from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import AdminConfig, Config, ServerConfig, WorkerEntry
from omni_proxy.upstream_http import resolver
from omni_proxy.upstream_http.resolver import (
    is_own_address,
    parse_listeners,
    reject_own_addresses,
)

PORT = 30000


def interface_address():
    """An address of this machine other than loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.parametrize(
    ("ip", "listener", "own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "::1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.9.9.9", "0.0.0.0", True),
        ("::1", "0.0.0.0", False),
        ("::1", "::", True),
        ("127.0.0.1", "::", True),
        ("192.0.2.1", "0.0.0.0", False),
        ("10.0.0.5", "10.0.0.5", True),
        ("127.0.0.1", "10.0.0.5", False),
        ("0.0.0.0", "10.0.0.5", False),
        ("no-address", "127.0.0.1", False),
    ],
)
def test_an_address_is_own_if_a_connection_would_reach_a_listener(ip, listener, own):
    assert is_own_address((ip, PORT), [(listener, PORT)]) is own
    assert not is_own_address((ip, PORT + 1), [(listener, PORT)])


@pytest.mark.skipif(interface_address() is None, reason="no network interface")
def test_the_address_of_an_interface_is_own():
    assert is_own_address((interface_address(), PORT), [("0.0.0.0", PORT)])
    assert not is_own_address((interface_address(), PORT), [("127.0.0.1", PORT)])


def test_shown_listeners_are_parsed():
    shown = ["127.0.0.1:1", "[::]:2", "unix:/run/x.sock", "http://127.0.0.1:3"]
    assert parse_listeners(shown) == [("127.0.0.1", 1), ("::", 2), ("127.0.0.1", 3)]


def config(*urls, host="127.0.0.1", listen=""):
    entries = tuple(WorkerEntry(url=url) for url in urls)
    return Config(
        workers=entries, server=ServerConfig(host=host, port=PORT), admin=AdminConfig(listen=listen)
    )


@pytest.mark.parametrize(
    ("url", "host", "listen"),
    [
        ("http://127.0.0.1:30000", "127.0.0.1", ""),
        ("http://localhost:30000", "127.0.0.1", ""),
        ("http://127.0.0.1:30000", "localhost", ""),
        ("https://127.0.0.1:30000", "0.0.0.0", ""),
        ("http://[::1]:30000", "::", ""),
        ("http://0.0.0.0:30000", "0.0.0.0", ""),
        ("http://127.0.0.1:30001", "127.0.0.1", "127.0.0.1:30001"),
    ],
)
def test_a_worker_that_is_the_proxy_is_refused(url, host, listen):
    with pytest.raises(ConfigError) as refused:
        reject_own_addresses(
            config("http://10.0.0.9:30000", url, host=host, listen=listen), (), "f.toml"
        )
    (problem,) = refused.value.problems
    assert (problem.path, problem.file) == ("workers[1].url", "f.toml")
    assert "this proxy itself" in problem.reason


def test_an_own_address_of_the_command_line_is_refused_with_its_flag():
    with pytest.raises(ConfigError, match="command line: --worker-urls"):
        reject_own_addresses(config(), ("http://127.0.0.1:30000",), "")


def test_other_workers_are_accepted_without_a_dns_lookup(monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr(resolver.socket, "getaddrinfo", fail)
    reject_own_addresses(config("http://a.test:1", "unix:/run/w", "http://10.0.0.9:30000"), (), "")
    reject_own_addresses(
        Config(server=ServerConfig(port=0), workers=config("http://a.test").workers), (), ""
    )


def test_a_slow_dns_lookup_is_given_up(monkeypatch):
    silent = socket.socketpair()
    monkeypatch.setattr(resolver.socket, "getaddrinfo", lambda *_, **__: silent[0].recv(1))
    monkeypatch.setattr(resolver, "RESOLVE_SECS", 0.05)
    reject_own_addresses(config("http://a.test:30000"), (), "")
    silent[1].close()
    silent[0].close()
