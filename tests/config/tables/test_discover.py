import msgspec
import pytest

from omni_proxy.config.diff import diff, redacted
from omni_proxy.config.parse import ConfigError, parse

PODS = '[[discover]]\napi_server = "https://k8s:6443"\nnamespace = "n"\n'


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(text)
    return str(error.value)


def test_a_table_needs_no_key_inside_a_cluster():
    (entry,) = parse("[[discover]]\n").discover
    assert (entry.name, entry.kind, entry.namespace, entry.selector, entry.port) == (
        "pods", "kubernetes", "", "app=sglang", 30000,
    )  # fmt: skip


def test_a_port_is_a_number_or_the_name_of_one():
    assert parse(PODS + "port = 80").discover[0].port == 80
    assert parse(PODS + 'port = "http"').discover[0].port == "http"
    assert "must be at most 65535" in refused(PODS + "port = 65536")
    assert "must not be empty" in refused(PODS + 'port = ""')
    assert "expected a whole number" in refused(PODS + "port = true")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[[discover]]\napi_server = "https://k8s"', "discover[0].namespace: is required"),
        (PODS + 'selector = "a=b c"', "is not a term of a label selector"),
        (PODS + 'role_label = "a b"', "is not a label key"),
        (PODS + 'client_cert = "c"', "needs client_key, too"),
        (PODS + 'dns_name = "a"', 'is for kind = "dns" only'),
        (PODS.replace("https", "http") + 'token_file = "t"', "in clear text"),
        (PODS.replace("https", "http") + 'ca_file = "t"', "https api_server only"),
        ('[[discover]]\nkind = "dns"', "dns_name: is missing"),
        ('[[discover]]\nkind = "dns"\ndns_name = "h"\nport = "http"', "port: must be a number"),
        (
            '[[discover]]\nkind = "dns"\ndns_name = "h"\nnamespace = "n"',
            'is for kind = "kubernetes" only',
        ),
        ('[[discover]]\nkind = "dns"\ndns_name = "http://h"', "is not a DNS name"),
        ('[[discover]]\nkind = "dns"\ndns_name = "h"\ndns_server = "h"', 'neither "host:port"'),
        ("[[discover]]\n[[discover]]\n", "duplicate name pods; discover[0].name has it already"),
        ('[[discover]]\napi_server = "http://169.254.169.254"\nnamespace = "n"', "link-local"),
    ],
)
def test_what_can_not_work_is_refused_with_its_key(text, reason):
    assert reason in refused(text)


@pytest.mark.parametrize("host", ["127.0.0.1:8001", "[::1]:8001", "localhost"])
def test_a_token_may_go_to_a_loopback_address_in_clear_text(host):
    text = f'[[discover]]\napi_server = "http://{host}"\nnamespace = "n"\ntoken_file = "t"'
    (source,) = parse(text).discover
    assert (source.api_server, source.token_file) == (f"http://{host}", "t")


def test_a_configuration_shows_it_as_the_file_has_it_and_a_change_of_it_by_its_name():
    old, new = parse(PODS), parse(PODS + 'port = "http"')
    assert msgspec.json.decode(msgspec.json.encode(redacted(new)))["discover"][0]["port"] == "http"
    assert diff(old, new)["discover"]["changed"] == {"pods": {"port": [30000, "http"]}}
