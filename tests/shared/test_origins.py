import pytest
from werkzeug.datastructures import Headers

from omni_proxy.shared.origins import is_from_foreign_page, is_loopback, parse_origin, shows_browser


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_hosts(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "10.0.0.1", "0.0.0.0", "127.example.com", "localhost.org"])
def test_other_hosts(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("own", "origin"),
    [("http://", "null"), ("http://a:b", "http://a:b"), ("http://a", "https://a")],
)
def test_an_origin_that_is_unreadable_or_another_one_is_foreign(own, origin):
    assert is_from_foreign_page(Headers({"Origin": origin}), parse_origin(own))


def test_a_page_of_the_own_origin_is_not_foreign():
    own = parse_origin("http://a:80")
    for headers in ({}, {"Origin": "http://a"}, {"Referer": "http://A/x"}):
        assert not is_from_foreign_page(Headers(headers), own)


@pytest.mark.parametrize("headers", [{}, {"User-Agent": "curl/8"}, {"Sec-Fetch-Mode": "cors"}])
def test_other_programs_show_no_browser(headers):
    assert not shows_browser(Headers(headers))
