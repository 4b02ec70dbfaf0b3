import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.admin_ops.selector import Selector, SelectorError, parse_selector

KEYS = st.from_regex(r"[a-z][a-z0-9_.]{0,6}", fullmatch=True).filter(
    lambda key: key not in ("in", "notin")
)
VALUES = st.from_regex(r"[A-Za-z0-9:/._-]{1,8}", fullmatch=True)
TERMS = st.tuples(
    KEYS, st.sampled_from(("=", "!=", "in", "notin")), st.lists(VALUES, min_size=1, max_size=3)
)
FACTS = st.dictionaries(KEYS, VALUES, max_size=4)


def format_term(term, space):
    key, sign, values = term
    if sign in ("=", "!="):
        return f"{key}{space}{sign}{space}{values[0]}"
    inner = f"{space},{space}".join(values)
    return f"{key} {sign}{space}({space}{inner}{space})"


def naive(term, facts):
    key, sign, values = term
    values = values[:1] if sign in ("=", "!=") else values
    included = key in facts and facts[key] in values
    return included if sign in ("=", "in") else not included


@given(st.lists(TERMS, min_size=1, max_size=4), FACTS, st.sampled_from(("", " ", "  ")))
def test_a_selector_is_the_conjunction_of_its_terms(terms, facts, space):
    text = f"{space},{space}".join(format_term(term, space) for term in terms)
    # A fact with the key of a term: otherwise hardly any selector would match.
    facts = facts | {terms[0][0]: terms[0][2][0]}
    expected = all(naive(term, facts) for term in terms)
    assert parse_selector(f"{space}{text}{space}").matches(facts) is expected


@given(st.text(alphabet="ab=!,() in", max_size=14))
def test_any_text_is_a_selector_or_refused_with_an_offset_in_it(text):
    refused = None
    try:
        terms = parse_selector(text).terms
    except SelectorError as error:
        refused = error
    assert terms if refused is None else 0 <= refused.offset <= len(text)


@pytest.mark.parametrize(
    ("text", "offset", "reason"),
    [
        ("", 0, "a key is missing"),
        ("  ", 2, "a key is missing"),
        ("a", 1, "one of =, !=, in, notin is missing"),
        ("a~b", 1, "one of =, !=, in, notin is missing"),
        ("a on (b)", 2, "one of =, !=, in, notin is missing"),
        ("a=", 2, "a value is missing"),
        ("a==b", 2, "a value is missing"),
        ("a=b,", 4, "a key is missing"),
        ("a=b c=d", 4, "',' is missing"),
        ("a in b", 5, "'(' is missing"),
        ("a in ()", 6, "a value is missing"),
        ("a in (b", 7, "')' is missing"),
        ("a in (b,)", 8, "a value is missing"),
    ],
)
def test_an_error_names_its_reason_and_its_offset(text, offset, reason):
    with pytest.raises(SelectorError) as caught:
        parse_selector(text)
    assert (caught.value.offset, str(caught.value)) == (offset, f"{reason} at offset {offset}")


def test_values_may_be_urls_and_a_missing_key_satisfies_not_equal():
    selector = parse_selector("url=http://127.0.0.1:8000,engine!=vllm")
    assert selector.matches({"url": "http://127.0.0.1:8000"})
    assert not selector.matches({"url": "http://127.0.0.1:8000", "engine": "vllm"})
    assert Selector().matches({})
