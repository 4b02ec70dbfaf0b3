import msgspec
import pytest

from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.schema import Config, WorkerEntry
from omni_proxy.config.supported import NOT_YET, not_yet, toml

DEFAULTS = msgspec.to_builtins(Config(workers=(WorkerEntry(url="http://a"),)))


def default_of(key):
    value = DEFAULTS
    for step in key.split("."):
        value = value[0][step] if isinstance(value, tuple) else value[step]
    return value


@pytest.mark.parametrize("key", NOT_YET)
def test_the_default_of_a_key_is_what_the_program_does_today(key):
    default = default_of(key)
    assert not not_yet(key, list(default) if isinstance(default, tuple) else default)


OTHER_VALUES = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value / 4 + 0.5,
    str: lambda value: value + "x",
}
CHOICES = {
    "weight_sync.mode": "coordinate",
    "weight_sync.backend": "nccl",
    "weight_sync.isolation": "thread",
    "weight_sync.on_failure": "rollback",
}


@pytest.mark.parametrize("key", NOT_YET)
def test_another_value_is_refused_and_never_ignored(key):
    default = default_of(key)
    value = CHOICES.get(key) or OTHER_VALUES[type(default)](default)
    entry = '[[workers]]\nurl = "http://a"\n' if key.startswith("workers.") else ""
    name = key.removeprefix("workers.")
    with pytest.raises(ConfigError, match="not supported yet"):
        parse(f"{entry}{name} = {toml(value)}")


def test_the_refusal_says_what_may_stand_there_today():
    with pytest.raises(ConfigError) as caught:
        parse('routing.voice_owner = "http://a"', "proxy.toml")
    assert str(caught.value) == (
        'proxy.toml:1: routing.voice_owner: "http://a" is not supported yet (today: "")'
    )


def test_a_list_may_hold_any_part_of_what_is_supported():
    assert parse("routing.retry_on = []").routing.retry_on == ()
    assert parse('routing.retry_on = ["connect_failure"]').routing.retry_on == ("connect_failure",)
