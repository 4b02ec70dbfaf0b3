import pytest

from omni_proxy.config.parse import ConfigError, parse

HEX = "ab" * 32
NAMED = '[[admin.keys]]\nname = "grafana"\n'


def test_a_key_reads_unless_its_role_says_more():
    config = parse(
        f'{NAMED}key_env = "A"\n[[admin.keys]]\nname = "b"\nkey_file = "f"\nrole = "all"\n'
    )
    assert [(key.name, key.role) for key in config.admin.keys] == [
        ("grafana", "read"),
        ("b", "all"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (NAMED, "exactly one of key_env, key_file, key_sha256, has 0"),
        (f'{NAMED}key_env = "A"\nkey_file = "f"\n', "exactly one of"),
        (f'{NAMED}key = "s3cret"\n', "keys are not written into the file"),
        (f'{NAMED}key_sha256 = "abc"\n', "64 hex digits"),
        (f'{NAMED}key_env = "A"\nrole = "admin"\n', "not one of all, operate, read, weights"),
        (f'{NAMED}key_env = "A"\n{NAMED}key_env = "B"\n', "duplicate name grafana"),
        (f'{NAMED}key_sha256 = "{HEX}"\n[[admin.keys]]\nname = "b"\nkey_sha256 = "{HEX}"\n',
         "admin.keys[1].key_sha256: duplicate SHA-256"),
        ('[[admin.keys]]\nname = "api_key"\nkey_env = "A"\n', "the name of [admin] api_key"),
        ('[[admin.keys]]\nkey_env = "A"\n', "admin.keys[0].name: is missing"),
    ],
)  # fmt: skip
def test_a_key_that_is_ambiguous_or_stands_in_the_file_is_refused(text, reason):
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert reason in str(refused.value)
    assert "s3cret" not in str(refused.value)
    assert HEX not in str(refused.value)
