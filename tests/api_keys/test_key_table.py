from hashlib import sha256

import pytest

from omni_proxy.api_keys.key_table import (
    KeyReader,
    KeyTable,
    UnusableKey,
    presented_key,
    resolve,
    sha256_of_key,
)
from omni_proxy.config.tables.keys import KeySource


def digest_of(key):
    return sha256(key.encode()).hexdigest()


def missing(path):
    raise FileNotFoundError(2, "No such file or directory", path)


def reader(environ=None, **files):
    def read_file(path):
        return files[path] if path in files else missing(path)

    return KeyReader(environ or {}, read_file)


def test_each_source_gives_the_hash_of_its_key():
    entries = (
        KeySource(name="a", key_env="A"),
        KeySource(name="b", key_file="file"),
        KeySource(name="c", key_sha256=digest_of("three")),
    )
    resolved, findings = resolve(entries, ("keys",), reader({"A": "one"}, file=b"two\n"))
    assert findings == []
    assert [entry.key_sha256 for entry in resolved] == [
        digest_of("one"), digest_of("two"), digest_of("three"),
    ]  # fmt: skip
    assert all(entry.source == "key_sha256" for entry in resolved)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (KeySource(name="a", key_env="UNSET"), "not set"),
        (KeySource(name="a", key_env="EMPTY"), "not set"),
        (KeySource(name="a", key_file="gone"), "No such file"),
        (KeySource(name="a", key_file="blank"), "contains no key"),
        (KeySource(name="a", key_file="two"), "more than one key"),
        (KeySource(name="a", key_file="long"), "bytes"),
    ],
    ids=lambda value: value.key_env or value.key_file if isinstance(value, KeySource) else "",
)
def test_a_source_without_a_usable_key_is_reported_with_its_path(entry, reason):
    files = {"blank": b" \n", "two": b"first-secret\nsecond-secret\n", "long": b"x" * 5000}
    resolved, findings = resolve((entry,), ("keys",), reader({"EMPTY": ""}, **files))
    assert resolved == ()
    ((path, why, _),) = findings
    assert path == ("keys", 0, entry.source)
    assert reason in why
    assert "secret" not in why


def test_one_key_for_two_names_is_refused_for_any_sources():
    entries = (
        KeySource(name="a", key_env="A"),
        KeySource(name="b", key_sha256=digest_of("same")),
    )
    _, findings = resolve(entries, ("admin", "keys"), reader({"A": "same"}))
    assert findings == [
        (
            ("admin", "keys", 1, "key_sha256"),
            "has the same key as another entry",
            "give each its own: admin.keys[0] has this one",
        )
    ]


def test_white_space_around_a_key_is_removed():
    assert sha256_of_key(b" abc\r\n") == digest_of("abc")
    with pytest.raises(UnusableKey):
        sha256_of_key(b"a b")


def test_the_table_finds_the_entry_of_a_key_by_its_hash():
    one = KeySource(name="one", key_sha256=digest_of("k1"))
    two = KeySource(name="two", key_sha256=digest_of("k2"))
    table = KeyTable((one, two))
    assert table.find(b"k1") is one
    assert table.find(b"k2") is two
    assert table.find(b"k") is None
    assert table.find(b"") is None
    assert table
    assert not KeyTable()


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "key"),
    [
        (b"Bearer abc", b"", b"abc"),
        (b"bearer  abc ", b"other", b"abc"),
        (b"", b" abc ", b"abc"),
        (b"Basic abc", b"", b""),
        (b"Basic abc", b"key", b"key"),
        (b"Bearer", b"key", b"key"),
        (b"", b"", b""),
    ],
)
def test_the_key_of_a_request_is_its_bearer_token_or_else_x_api_key(authorization, x_api_key, key):
    assert presented_key(authorization, x_api_key) == key
