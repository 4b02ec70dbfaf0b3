import pytest

from omni_proxy.config import validate
from omni_proxy.config.parse import ConfigError, parse

OWNED = '[routing]\nvoice_owner = "http://A:80"\n[[workers]]\nurl = "http://a:80/"\n'


def test_a_voice_owner_is_normalized_and_need_not_be_a_worker_of_the_file():
    assert parse(OWNED).routing.voice_owner == "http://a:80"
    assert parse('routing.voice_owner = "http://b:1"').routing.voice_owner == "http://b:1"


def test_a_voice_owner_without_the_required_capabilities_is_refused():
    with pytest.raises(ConfigError, match="a:80 lacks audio_input, required for keeping voices"):
        parse(OWNED + 'capabilities = ["chat", "speech"]\n')


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("server", "access_log"),
        ("server", "route_log"),
        ("server", "log_file"),
        ("admin", "audit_log"),
    ],
)
def test_an_invalid_target_of_a_log_is_refused(table, key):
    for word, hint in [
        ("stderr", "/dev/stderr"),
        ("Stdout", '"-"'),
        ("on", '"-"'),
        ("no", '"off"'),
    ]:
        with pytest.raises(ConfigError, match=rf"{key}: .*{hint}.*\./{word}"):
            parse(f'{table}.{key} = "{word}"')
    for target in ("off", "-", "/dev/stderr", "./stderr", "logs/stdout"):
        assert getattr(getattr(parse(f'{table}.{key} = "{target}"'), table), key) == target


@pytest.mark.parametrize(
    "name", ["Host", "te", "Proxy-Authorization", "trailers", "x-omni-weight-version", "a b"]
)
def test_a_header_that_ends_at_the_proxy_has_no_request_id(name):
    for value in (f'request_id_header = "{name}"', f'request_id_headers = ["{name}"]'):
        with pytest.raises(ConfigError, match="can't be used as this header"):
            parse(f"[server]\n{value}\n")


KV = '[[workers]]\nurl = "http://a:80"\n'


def test_endpoints_of_kv_events_are_kept_as_written():
    worker = parse(KV + 'kv_events = "tcp://[fd00::1]:5557"\nkv_replay = "tcp://h:5558"\n').workers[
        0
    ]
    assert (worker.kv_events, worker.kv_replay) == ("tcp://[fd00::1]:5557", "tcp://h:5558")
    assert parse(KV + 'kv_events = "tcp://*:5557"\n').workers[0].kv_events == "tcp://*:5557"


@pytest.mark.parametrize(
    "value", ["", "on", "tcp://h", "tcp://h:0", "tcp://h:65536", "udp://h:1", "tcp://h:1/x",
              "tcp://169.254.169.254:5557"],
)  # fmt: skip
def test_invalid_endpoints_of_kv_events_are_refused(value):
    with pytest.raises(ConfigError, match="kv_events"):
        parse(KV + f'kv_events = "{value}"\n')


def test_a_replay_socket_without_a_publisher_is_refused():
    with pytest.raises(ConfigError, match=r"kv_replay.*has no effect without kv_events"):
        parse(KV + 'kv_replay = "tcp://h:5558"\n')


def test_kv_events_without_zeromq_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(validate, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'omni-proxy\[kv-events\]'"):
        parse(KV + 'kv_events = "auto"\n')
    assert parse(KV).workers[0].kv_events == "off"
