import pytest

from omni_proxy.config.parse import ConfigError, parse

HEX = "ab" * 32
ENTRY = '[[admin.keys]]\nname = "grafana"\n'


def test_the_default_role_of_a_key_is_read():
    config = parse(
        f'{ENTRY}key_env = "A"\n[[admin.keys]]\nname = "b"\nkey_file = "f"\nrole = "all"\n'
    )
    assert [(key.name, key.role) for key in config.admin.keys] == [
        ("grafana", "read"),
        ("b", "all"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ENTRY, "exactly one of key_env, key_file, key_sha256, has 0"),
        (f'{ENTRY}key_env = "A"\nkey_file = "f"\n', "exactly one of"),
        (f'{ENTRY}key = "s3cret"\n', "keys are not written into the file"),
        (f'{ENTRY}key_sha256 = "abc"\n', "64 hex digits"),
        (f'{ENTRY}key_env = "A"\nrole = "admin"\n', "not one of all, operate, read, weights"),
        (f'{ENTRY}key_env = "A"\n{ENTRY}key_env = "B"\n', "duplicate name grafana"),
        (f'{ENTRY}key_sha256 = "{HEX}"\n[[admin.keys]]\nname = "b"\nkey_sha256 = "{HEX}"\n',
         "admin.keys[1].key_sha256: duplicate SHA-256"),
        ('[[admin.keys]]\nname = "api_key"\nkey_env = "A"\n', "the name of [admin] api_key"),
        ('[[admin.keys]]\nkey_env = "A"\n', "admin.keys[0].name: is missing"),
    ],
)  # fmt: skip
def test_an_ambiguous_key_or_one_in_the_file_is_refused(text, reason):
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert reason in str(refused.value)
    assert "s3cret" not in str(refused.value)
    assert HEX not in str(refused.value)
