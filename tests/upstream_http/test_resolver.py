import pytest
import trio

from omni_proxy.upstream_http.resolver import RefusedAddress, addresses, resolve


def resolve_to(monkeypatch, *ips):
    async def getaddrinfo(host, port, **hints):
        return [(2, 1, 6, "", (ip, port)) for ip in ips]

    monkeypatch.setattr(trio.socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1", "10.0.0.1"])
async def test_a_literal_address_is_returned(ip):
    assert await resolve(ip, 80) == (ip, 80)


async def test_a_name_has_each_address_once_in_order(monkeypatch):
    resolve_to(monkeypatch, "10.0.0.2", "10.0.0.1", "10.0.0.2")
    assert await addresses("some.name", 80) == (("10.0.0.2", 80), ("10.0.0.1", 80))
    assert await resolve("some.name", 80) == ("10.0.0.2", 80)


@pytest.mark.parametrize("ip", ["169.254.169.254", "fe80::1%eth0", "fd00:ec2::254"])
async def test_one_refused_address_refuses_the_name(monkeypatch, ip):
    resolve_to(monkeypatch, "10.0.0.1", ip)
    with pytest.raises(RefusedAddress):
        await resolve("some.name", 80)


async def test_a_literal_address_can_be_refused_too():
    with pytest.raises(RefusedAddress):
        await resolve("169.254.169.254", 80)


@pytest.mark.parametrize("name", ["a" * 70, ".."])
async def test_an_invalid_name_is_an_oserror(name):
    with pytest.raises(OSError):
        await resolve(name, 80)
