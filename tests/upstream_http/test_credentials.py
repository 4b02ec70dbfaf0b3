from types import SimpleNamespace

import pytest

from omni_proxy.upstream_http.credentials import (
    credentials_of,
    headers_with_own_key,
    lines_with_own_key,
)

LINES = b"POST / HTTP/1.1\r\nauthorization: Bearer c\r\nx-api-key: c\r\na: b\r\n"
HEADERS = {"authorization": "Bearer c", "x-api-key": "c", "a": "b"}


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setenv("WORKER_KEY", "k3y")
    return SimpleNamespace(api_key_env="WORKER_KEY")


def test_a_workers_own_key_is_the_only_credential(worker):
    own = lines_with_own_key(worker, LINES)
    assert own == b"POST / HTTP/1.1\r\na: b\r\nauthorization: Bearer k3y\r\n"
    own = headers_with_own_key(worker, HEADERS)
    assert own == {"a": "b", "authorization": "Bearer k3y"}


@pytest.mark.parametrize("name", ["", "UNSET_KEY"])
def test_without_an_own_key_the_callers_credentials_remain(worker, name):
    worker.api_key_env = name
    assert lines_with_own_key(worker, LINES) == LINES
    assert headers_with_own_key(worker, HEADERS) == HEADERS


def test_further_calls_have_the_authorization_of_the_first_one():
    assert credentials_of(HEADERS) == {"authorization": "Bearer c"}
    assert credentials_of({"a": "b"}) == {}
