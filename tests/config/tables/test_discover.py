import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.diff import diff, redacted
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.config.tables.discover import is_label_key, matches, parse_selector

PODS = '[[discover]]\napi_server = "https://k8s:6443"\nnamespace = "n"\n'


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(text)
    return str(error.value)


def test_inside_a_cluster_all_keys_are_optional():
    (entry,) = parse("[[discover]]\n").discover
    assert (entry.name, entry.kind, entry.namespace, entry.selector, entry.port) == (
        "pods", "kubernetes", "", "app=sglang", 30000,
    )  # fmt: skip


def test_a_port_is_a_number_or_a_name():
    assert parse(PODS + "port = 80").discover[0].port == 80
    assert parse(PODS + 'port = "http"').discover[0].port == "http"
    assert "must be at most 65535" in refusal(PODS + "port = 65536")
    assert "must not be empty" in refusal(PODS + 'port = ""')
    assert "expected a whole number" in refusal(PODS + "port = true")


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
def test_an_invalid_table_is_refused_with_its_key(text, reason):
    assert reason in refusal(text)


@pytest.mark.parametrize("host", ["127.0.0.1:8001", "[::1]:8001", "localhost"])
def test_a_token_may_be_sent_to_a_loopback_address_in_clear_text(host):
    text = f'[[discover]]\napi_server = "http://{host}"\nnamespace = "n"\ntoken_file = "t"'
    (source,) = parse(text).discover
    assert (source.api_server, source.token_file) == (f"http://{host}", "t")


def test_a_source_is_shown_as_in_the_file_and_its_change_by_name():
    old, new = parse(PODS), parse(PODS + 'port = "http"')
    assert msgspec.json.decode(msgspec.json.encode(redacted(new)))["discover"][0]["port"] == "http"
    assert diff(old, new)["discover"]["changed"] == {"pods": {"port": [30000, "http"]}}


LABELS = {"app": "sglang", "tier": "gpu", "empty": "", "example.com/role": "decode"}


@pytest.mark.parametrize(
    ("text", "matching"),
    [
        ("", True),
        ("app=sglang", True),
        ("app==sglang", True),
        (" app = sglang , tier=gpu ", True),
        ("app=sglang,tier=cpu", False),
        ("app!=vllm", True),
        ("missing!=x", True),
        ("missing=x", False),
        ("empty=", True),
        ("tier in (cpu, gpu)", True),
        ("tier in (cpu)", False),
        ("tier notin (cpu)", True),
        ("missing notin (cpu)", True),
        ("missing in (cpu,)", False),
        ("example.com/role", True),
        ("missing", False),
        ("!missing", True),
        ("! app", False),
        ("app in (a,sglang),!missing,tier", True),
        ("app=", False),
    ],
)
def test_a_selector_matches_as_in_kubernetes(text, matching):
    assert matches(parse_selector(text), LABELS) is matching


@pytest.mark.parametrize("text", ["app=a b", "=x", "a in b", "a in (b", "app=a,,b", "a>1", "-a=b"])
def test_an_invalid_selector_is_refused_with_the_term(text):
    with pytest.raises(ValueError, match="is not a term of a label selector"):
        parse_selector(text)


NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,4}[a-z0-9])?", fullmatch=True)


@given(pairs=st.dictionaries(NAMES, NAMES), labels=st.dictionaries(NAMES, NAMES))
def test_equalities_match_exactly_the_labels_that_include_them(pairs, labels):
    selector = parse_selector(",".join(f"{key}={value}" for key, value in pairs.items()))
    assert matches(selector, labels) is (pairs.items() <= labels.items())


def test_a_label_key_has_a_name_and_optionally_a_domain():
    assert is_label_key("app.kubernetes.io/name")
    assert not is_label_key("a/b/c")
    assert not is_label_key("")
