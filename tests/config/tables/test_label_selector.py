import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.tables.label_selector import is_label_key, matches, parse_selector

LABELS = {"app": "sglang", "tier": "gpu", "empty": "", "example.com/role": "decode"}


@pytest.mark.parametrize(
    ("text", "holds"),
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
    ],
)
def test_a_selector_holds_as_it_does_for_an_api_server(text, holds):
    assert matches(parse_selector(text), LABELS) is holds


@pytest.mark.parametrize(
    "text", ["app=a b", "app=", "=x", "a in b", "a in (b", "app=a,,b", "a>1", "-a=b"]
)
def test_what_is_no_selector_is_refused_with_the_term(text):
    if text == "app=":
        assert not matches(parse_selector(text), LABELS)
        return
    with pytest.raises(ValueError, match="is not a term of a label selector"):
        parse_selector(text)


NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,4}[a-z0-9])?", fullmatch=True)


@given(wanted=st.dictionaries(NAMES, NAMES), labels=st.dictionaries(NAMES, NAMES))
def test_equalities_hold_exactly_for_labels_that_include_them(wanted, labels):
    selector = parse_selector(",".join(f"{key}={value}" for key, value in wanted.items()))
    assert matches(selector, labels) is (wanted.items() <= labels.items())


def test_a_label_key_has_a_name_and_perhaps_a_domain():
    assert is_label_key("app.kubernetes.io/name")
    assert not is_label_key("a/b/c")
    assert not is_label_key("")
