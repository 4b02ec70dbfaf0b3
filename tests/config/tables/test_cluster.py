"""The table [cluster]: its keys and checks; passwords are not shown."""

import pytest

from omni_proxy.config.diff import diff, redacted
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.cluster import StoreAddress, hide_password, store_address


def table(*lines):
    return parse("[cluster]\n" + "\n".join(lines), "f").cluster


def problem(*lines):
    with pytest.raises(ConfigError) as caught:
        table(*lines)
    return str(caught.value)


def test_the_url_of_a_store():
    assert store_address("redis://h") == StoreAddress("h", 6379, False, "", "", 0)
    assert store_address("rediss://u:p%40x@h:7000/3") == StoreAddress(
        "h", 7000, True, "u", "p@x", 3
    )


@pytest.mark.parametrize("url", ["http://h", "redis://", "redis://h:x", "redis://h/db", "h:6379"])
def test_an_invalid_url_is_refused(url):
    assert "cluster.url" in problem(f'url = "{url}"')


def test_an_error_does_not_repeat_the_url():
    assert "hunter2" not in problem('url = "redis://u:hunter2@h/not-a-number"').split("\n")[0]


def test_a_password_is_hidden():
    config = parse('[cluster]\nurl = "redis://u:hunter2@h:6379/1"', "f")
    assert redacted(config)["cluster"]["url"] == "redis://u:***@h:6379/1"
    assert "hunter2" not in str(diff(Config(), config))
    assert hide_password("redis://:hunter2@h") == "redis://:***@h"
    assert hide_password("redis://h") == "redis://h"


def test_contradicting_keys_are_refused():
    assert "drop one" in problem('url = "redis://h"', 'url_env = "STORE"')
    assert "needs url" in problem('password_file = "p"')
    assert "publish_secs" in problem("publish_secs = 1", "lease_secs = 2")


def test_without_a_url_the_cluster_is_off():
    assert not Config().cluster.enabled
    assert table('url_env = "STORE"').enabled
