import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.load_report import (
    NO_REPORT,
    LoadReport,
    add_loads,
    find_load_field,
    load_of_header,
    loads_of_metrics,
    loads_of_records,
    pieces_of,
    split_load_field,
    total_load,
)

VLLM = b"""\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5
"""
SGLANG = b"""\
sglang:num_queue_reqs{model_name="m",engine_type="unified",tp_rank="0",dp_rank="1"} 2.0
sglang:num_queue_reqs{model_name="m",engine_type="unified",tp_rank="1",dp_rank="1"} 1.0
sglang:token_usage{model_name="m"} 0.75
"""
NAMED = {"named_metrics": {"kv_cache_usage_perc": 0.5, "num_requests_waiting": 3.0}}


@pytest.mark.parametrize(
    ("value", "report"),
    [
        (b" JSON " + json.dumps(NAMED).encode(), LoadReport(3.0, 0.5)),
        (b' json {"named_metrics": {"num_requests_waiting": 0, "x": 1}}', LoadReport(0.0, None)),
        (
            b" TEXT named_metrics.num_requests_waiting=2.0, named_metrics.kv_cache_usage_perc=0.1",
            LoadReport(2.0, 0.1),
        ),
        (b'JSON {"named_metrics": {"num_requests_waiting": 1e999}}', NO_REPORT),
        (b'JSON {"named_metrics": {"num_requests_waiting": -1}}', NO_REPORT),
        (b'JSON {"named_metrics": {"kv_cache_usage_perc": 80.0}}', NO_REPORT),
        (b'JSON {"named_metrics": {"kv_cache_usage_perc": "0.5"}}', NO_REPORT),
        (b'JSON {"named_metrics": 3}', NO_REPORT),
        (b"JSON {}", NO_REPORT),
        (b"JSON", NO_REPORT),
        (b"TEXT named_metrics.kv_cache_usage_perc=nan", NO_REPORT),
        (b"BIN AAAA", NO_REPORT),
        (b'JSON {"x": ' + b"[" * 2000 + b"]" * 2000 + b"}", NO_REPORT),  # nested too deeply
        (b"", NO_REPORT),
    ],
)
def test_the_header_is_read_in_both_forms(value, report):
    assert load_of_header(value) == report


def test_a_metrics_page_has_a_load_for_each_engine():
    assert loads_of_metrics(VLLM) == {0: LoadReport(3.0, 0.25), 1: LoadReport(0.0, 0.5)}
    assert loads_of_metrics(SGLANG) == {1: LoadReport(2.0, None), 0: LoadReport(None, 0.75)}
    assert loads_of_metrics(b"trtllm_num_requests_waiting 4\n") == {0: LoadReport(4.0, None)}
    assert loads_of_metrics(b"up 1\n") == loads_of_metrics(b"") == {}


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:num_requests_waiting{engine="0"} NaN', b'vllm:num_requests_waiting{engine="0"} -1',
        b'vllm:num_requests_waiting{engine="0"} +Inf', b"vllm:kv_cache_usage_perc 1.5",
        b"vllm:num_requests_waiting", b'vllm:num_requests_waiting{engine="0" 3',
        b'vllm:num_requests_waiting{engine="5000"} 1', b" vllm:num_requests_waiting 3",
    ],
)  # fmt: skip
def test_a_line_without_a_valid_load_is_ignored(line):
    assert loads_of_metrics(line + b"\n") == {}


def test_the_loads_of_all_pieces_are_those_of_the_page():
    text = VLLM + SGLANG
    for size in (1, 50, 200, len(text)):
        assert b"".join(pieces_of(text, size)) == text
        loads = {}
        for piece in pieces_of(text, size):
            add_loads(loads, loads_of_metrics(piece))
        assert loads == loads_of_metrics(text)


def records(*loads):
    return {"loads": list(loads)}


@pytest.mark.parametrize(
    ("body", "loads"),
    [
        (
            records({"dp_rank": 1, "num_waiting_reqs": 2, "token_usage": 0.5}, {"dp_rank": 0}),
            {1: LoadReport(2.0, 0.5)},
        ),
        (records({"num_waiting_reqs": 1}), {0: LoadReport(1.0, None)}),
        (records({"num_waiting_reqs": 1, "source": "proxy"}), {}),
        (records({"num_waiting_reqs": True}, {"token_usage": "1"}, 3), {}),
        (records({"num_waiting_reqs": 10**400}, {"token_usage": math.nan}), {}),
        (records(), {}),
        ({"loads": 3}, {}),
        ([], {}),
        (None, {}),
    ],
)
def test_load_records_have_a_load_for_each_rank(body, loads):
    assert loads_of_records(body) == loads


def test_the_total_load_has_the_sum_of_waiting_requests_and_the_mean_usage():
    loads = {0: LoadReport(3.0, 0.25), 1: LoadReport(1.0, 0.75), 2: LoadReport(None, None)}
    assert total_load(loads) == LoadReport(4.0, 0.5)
    assert total_load({}) == NO_REPORT


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nendpoint-load-metrics: JSON {}\r\nx: y"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: y"


def test_the_field_is_removed_from_any_position_in_a_head():
    assert split_load_field(HEAD) == find_load_field(HEAD) == (PLAIN, b" JSON {}")
    last = PLAIN + b"\r\nendpoint-load-metrics: TEXT a=1"
    assert find_load_field(last + b"\r\n\r\n") == (PLAIN + b"\r\n\r\n", b" TEXT a=1")
    assert find_load_field(last)[0] == PLAIN
    assert split_load_field(last + b"\r\n\r\n") == (PLAIN + b"\r\n\r\n", b" TEXT a=1")
    assert split_load_field(PLAIN) == find_load_field(PLAIN) == (PLAIN, b"")
    assert find_load_field(HEAD.replace(b"endpoint-load", b"Endpoint-Load"))[0] == PLAIN
    assert find_load_field(HEAD + b"\r\nENDPOINT-LOAD-METRICS: x") == (PLAIN, b" JSON {}")


def test_fields_with_a_longer_name_are_kept():
    head = PLAIN + b"\r\nendpoint-load-metrics-format: JSON\r\n\r\n"
    assert split_load_field(head) == find_load_field(head) == (head, b"")


def is_sound(report):
    waiting, usage = report
    waiting_is_sound = waiting is None or 0 <= waiting < math.inf
    return waiting_is_sound and (usage is None or 0 <= usage <= 1)


@given(st.binary(max_size=200) | st.text(max_size=80).map(lambda text: b"JSON " + text.encode()))
def test_arbitrary_headers_are_read_without_an_error(value):
    assert is_sound(load_of_header(value))


LINES = st.lists(
    st.sampled_from(VLLM.splitlines() + SGLANG.splitlines()) | st.binary(max_size=60), max_size=8
)


@given(LINES)
def test_arbitrary_pages_are_read_without_an_error(lines):
    assert all(map(is_sound, loads_of_metrics(b"\n".join(lines)).values()))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["loads", "dp_rank", "num_waiting_reqs", "token_usage", "source"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_arbitrary_records_are_read_without_an_error(body):
    assert all(map(is_sound, loads_of_records(body).values()))
    assert all(map(is_sound, loads_of_records({"loads": [body]}).values()))
