import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.discovery.object_list import LineBuffer, walk_list

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
ITEMS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=4)


@given(
    rest=st.dictionaries(st.sampled_from(["kind", "metadata", "z"]), VALUES),
    items=ITEMS,
    indent=st.sampled_from([None, 1]),
)
def test_a_list_is_read_as_the_json_module_reads_it(rest, items, indent):
    walked = list(walk_list(json.dumps({"kind": "List", "items": items, **rest}, indent=indent)))
    assert [value for key, value in walked if key == "items"] == items
    assert {key: value for key, value in walked if key != "items"} == {"kind": "List", **rest}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"items": [{}',
        '{"items": [{},]}',
        '{"a" 1}',
        "{1: 2}",
        '{"a": }',
        "{" * 5,
        "[" * 100_000,
    ],
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError):
        list(walk_list(text))


def test_items_that_are_none_are_no_items():
    assert list(walk_list('{"items": null}')) == [("items", None)]
    assert list(walk_list("{}")) == []


@given(lines=st.lists(st.text(alphabet="ab ", max_size=5)), cuts=st.lists(st.integers(0, 40)))
def test_lines_are_whole_however_they_are_cut(lines, cuts):
    data = "".join(f"{line}\n" for line in lines).encode()
    buffer, found = LineBuffer(100), []
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(places):
        found += buffer.feed(data[start:end])
    assert found == [line.encode() for line in lines if line.strip()]


def test_a_line_without_an_end_is_refused():
    buffer = LineBuffer(10)
    buffer.feed(b"12345")
    with pytest.raises(ValueError, match="more than 10 bytes"):
        buffer.feed(b"678901")
