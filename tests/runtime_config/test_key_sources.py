import logging
import os
from hashlib import sha256

import pytest
import trio

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import KeySource
from omni_proxy.runtime_config.key_sources import KeySources


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "team-a"
    path.write_text("first\n")
    return path


def sources_of(*entries):
    sources = KeySources(("keys",), lambda _config: entries, "proxy.toml")
    sources.prepare(Config())()
    return sources


def rewrite(path, text, changes):
    path.write_text(text)
    os.utime(path, ns=(changes * 10**9, changes * 10**9))  # each write gets another time


def name_of(sources, key):
    entry = sources.table.find(key)
    return entry.name if entry is not None else None


async def test_a_changed_file_replaces_its_key(key_file, autojump_clock):
    sources, calls = sources_of(KeySource(name="a", key_file=str(key_file))), []
    sources.watch(lambda: calls.append(1))
    assert name_of(sources, b"first") == "a"
    rewrite(key_file, "second", 1)
    await sources.poll()
    assert name_of(sources, b"second") == "a"
    assert name_of(sources, b"first") is None
    assert calls == [1]
    await sources.poll()
    assert calls == [1]


@pytest.mark.parametrize("content", [None, "", "known"], ids=["gone", "empty", "another's key"])
async def test_a_file_that_cannot_be_used_leaves_the_previous_keys(
    key_file, content, caplog, autojump_clock
):
    other = KeySource(name="b", key_sha256=sha256(b"known").hexdigest())
    sources = sources_of(KeySource(name="a", key_file=str(key_file)), other)
    if content is None:
        key_file.unlink()
    else:
        rewrite(key_file, content, 1)
    with caplog.at_level(logging.ERROR):
        await sources.poll()
        await sources.poll()
    assert name_of(sources, b"first") == "a"
    assert name_of(sources, b"known") == "b"
    assert "keys[0]" in sources.error
    assert len(caplog.records) == 1
    rewrite(key_file, "second", 2)
    await sources.poll()
    assert name_of(sources, b"second") == "a"
    assert sources.error == ""


def test_a_configuration_whose_keys_cannot_be_read_is_refused(key_file):
    key_file.unlink()
    sources = KeySources(
        ("keys",), lambda _config: [KeySource(name="a", key_file=str(key_file))], "proxy.toml"
    )
    with pytest.raises(ConfigError, match=r"proxy.toml: keys\[0\].key_file: cannot be read"):
        sources.prepare(Config())
    assert not sources.table


async def test_the_service_polls_by_itself(key_file, autojump_clock):
    sources, changed = sources_of(KeySource(name="a", key_file=str(key_file))), trio.Event()
    sources.watch(changed.set)
    async with trio.open_nursery() as nursery:
        await nursery.start(sources.run)
        rewrite(key_file, "second", 1)
        await changed.wait()
        nursery.cancel_scope.cancel()
    assert name_of(sources, b"second") == "a"
