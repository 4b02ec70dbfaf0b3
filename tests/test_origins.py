import pytest

from omni_proxy.origins import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_hosts(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "10.0.0.1", "0.0.0.0", "127.example.com", "localhost.org"])
def test_other_hosts(host):
    assert not is_loopback(host)
