import ipaddress
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.url import (
    dial_address,
    display_id,
    normalize_url,
    refused_address,
    worker_id,
)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        (" HTTP://LocalHost:1 ", "http://localhost:1"),
        ("http://[::1]:1/", "http://[::1]:1"),
        ("http://[0:0:0:0:0:0:0:1]", "http://[::1]"),
        ("https://h", "https://h"),
        ("http://h?", "http://h"),
        ("http://h#", "http://h"),
        ("http://a:80", "http://a:80"),
        ("http://a_b.c-d:0080", "http://a_b.c-d:80"),
        ("http://10.0.0.1:65535", "http://10.0.0.1:65535"),
        ("http://0x7f.1:9", "http://127.0.0.1:9"),
        ("http://2130706433", "http://127.0.0.1"),
        ("unix:/run/w.sock", "unix:/run/w.sock"),
        ("UNIX:/run/W.sock", "unix:/run/W.sock"),
    ],
)
def test_each_worker_has_one_normalized_url(text, url):
    assert normalize_url(text, allow_unix=True) == url
    assert normalize_url(url, allow_unix=True) == url


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("127.0.0.1:8000", "scheme must be http or https"),
        ("ftp://h", "scheme must be http or https"),
        ("http://", "must include a host"),
        ("http:///x", "must include a host"),
        ("http://u:p@h", "user-info"),
        ("http://@h", "user-info"),
        ("http://h/v1", "base URL without a path"),
        ("http://h//", "base URL without a path"),
        ("http://h?x=1", "query or fragment"),
        ("http://h#f", "query or fragment"),
        ("http://h:0", "port out of range"),
        ("http://h:99999", "port out of range"),
        ("http://h:http", "port out of range"),
        ("http://h:-1", "port out of range"),
        ("http://h\tx", "spaces or control"),
        ("http://a b", "spaces or control"),
        ("http://h\nx", "spaces or control"),
        ("http://[::1", "IPv6"),
        ("http://[::g]", "IPv6"),
        ("http://[v1.x]", "IPv6"),
        ("http://256.1.1.1", "not an IPv4 address"),
        ("http://1.2.3.4.5", "not an IPv4 address"),
        ("http://09.1", "not an IPv4 address"),
        ("http://99999999999", "not an IPv4 address"),
        ("http://a..b", "letters, digits"),
        ("http://%31%32", "letters, digits"),
        ("http://münchen", "letters, digits"),
        ("http://１６９.254.169.254", "not an IPv4 address"),  # noqa: RUF001
        ("unix:", "absolute path"),
        ("unix:w.sock", "absolute path"),
        ("unix:/" + "x" * 107, "at most 107 bytes"),
        ("unix:/a\0b", "NUL"),
    ],
)
def test_an_invalid_base_url_is_refused_with_its_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        normalize_url(text, allow_unix=True)


def test_a_unix_worker_is_allowed_in_the_configuration_file_only():
    with pytest.raises(ValueError, match="configuration file only"):
        normalize_url("unix:/run/w.sock", allow_unix=False)


FORBIDDEN = [
    "169.254.169.254",
    "169.254.169.254.",
    "169.254.1.2",
    "2852039166",
    "0xa9fea9fe",
    "0XA9FEA9FE",
    "0xa9.0xfe.0xa9.0xfe",
    "0251.0376.0251.0376",
    "169.254.43518",
    "169.16689662",
    "025177524776",
    "[fe80::1]",
    "[FE80::1%25eth0]",
    "[fe80::1%eth0]",
    "[febf::1]",
    "[::ffff:169.254.169.254]",
    "[::FFFF:A9FE:A9FE]",
    "[0:0:0:0:0:ffff:a9fe:a9fe]",
    "[::169.254.169.254]",
    "[::ffff:0:169.254.169.254]",
    "[64:ff9b::169.254.169.254]",
    "[2002:a9fe:a9fe::]",
    "[64:ff9b:1::a9fe:a9fe]",
    "[64:ff9b:1:a9fe:a9:fe00::]",
    "[64:ff9b:1:a9:fe:a9fe::]",
    "[64:ff9b:1:0:a9:fea9:fe00:0]",
    "[2001:0:a9fe:a9fe::]",
    "[2001::5601:5601]",
    "[2001:db8::5efe:a9fe:a9fe]",
    "[2001:db8::200:5efe:a9fe:a9fe]",
    "[fd00:ec2::254]",
    "[FD00:0EC2:0::0254]",
    "[fd20:ce::254]",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "metadata.google.internal",
    "Metadata.Google.Internal.",
    "METADATA",
    "metadata.goog",
    "instance-data",
]


@pytest.mark.parametrize("host", FORBIDDEN)
@pytest.mark.parametrize("form", ["http://{}", "HTTPS://{}:80/"])
def test_a_metadata_service_is_refused_in_any_spelling(host, form):
    with pytest.raises(ValueError, match=r"not allowed|IPv6 address"):
        normalize_url(form.format(host), allow_unix=True)


@pytest.mark.parametrize("host", [host for host in FORBIDDEN if host.strip("[].")[-1].isdigit()])
def test_a_resolved_address_is_refused_like_a_written_one(host):
    assert "not allowed" in (refused_address(host) or "")


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1", "10.0.0.1", "fd00::1", "::ffff:10.0.0.1", "h"])
def test_an_ordinary_address_is_not_refused(ip):
    assert refused_address(ip) is None


def spelling_of(address, data):
    """One of the spellings that inet_aton(3) reads, drawn from `data`."""
    octets = list(address.packed)
    count = data.draw(st.integers(0, 3))
    numbers = [*octets[:count], int.from_bytes(bytes(octets[count:]))]
    form = st.sampled_from(["{}", "0x{:x}", "0X{:X}", "0{:o}", "000{:o}"])
    return ".".join(data.draw(form).format(number) for number in numbers)


@given(address=st.ip_addresses(v=4), data=st.data())
def test_every_numeric_spelling_of_an_address_is_that_address(address, data):
    text = spelling_of(address, data)
    if refused_address(str(address)):
        with pytest.raises(ValueError, match="not allowed"):
            normalize_url(f"http://{text}", allow_unix=False)
    else:
        assert normalize_url(f"http://{text}", allow_unix=False) == f"http://{address}"


@given(address=st.ip_addresses(v=4, network="169.254.0.0/16"), data=st.data())
def test_every_numeric_spelling_of_a_link_local_address_is_refused(address, data):
    assert refused_address(spelling_of(address, data))
    assert refused_address(f"::ffff:{address}")


NAT64 = ipaddress.IPv6Network("64:ff9b::/47")


@given(st.ip_addresses(v=6))
def test_a_v6_address_is_refused_if_it_or_its_embedded_v4_address_is(address):
    embedded = address.ipv4_mapped or address.sixtofour
    expected = address.is_link_local or (embedded is not None and embedded.is_link_local)
    # FORBIDDEN has cases of addresses that are embedded in those that are left out here.
    if not address.is_private and address not in NAT64:
        assert bool(refused_address(str(address))) == expected


@given(st.text(max_size=30))
def test_any_text_is_normalized_once_or_refused(text):
    for candidate in (text, f"http://{text}"):
        url = None
        with suppress(ValueError):
            url = normalize_url(candidate, allow_unix=True)
        assert url is None or normalize_url(url, allow_unix=True) == url


@pytest.mark.parametrize(
    ("url", "identity", "shown", "address"),
    [
        ("http://h:8011", "http%3A%2F%2Fh%3A8011", "h:8011", ("h", 8011)),
        ("http://h", "http%3A%2F%2Fh", "h", ("h", 80)),
        ("https://h", "https%3A%2F%2Fh", "h", ("h", 443)),
        ("http://[::1]:5", "http%3A%2F%2F%5B%3A%3A1%5D%3A5", "[::1]:5", ("::1", 5)),
        ("unix:/run/w", "unix%3A%2Frun%2Fw", "unix:/run/w", "/run/w"),
    ],
)
def test_the_id_the_name_and_the_address_of_a_url(url, identity, shown, address):
    assert worker_id(url) == identity
    assert display_id(url) == shown
    assert dial_address(url) == address
