"""The report of a run: percentiles, the table, JSON, the chart."""

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.simulate.report import Run, as_json, percentile, svg, table
from omni_proxy.simulate.workload import Facts

TIMES = {"mean": 12.0, "p50": 10.0, "p90": 20.0, "p99": 1234.5}


def run(policy="cache_aware", settings=None, goodput=None):
    return Run(policy, settings or {}, 10, 9, 1, 2, 0.3652, 1.25, goodput, TIMES, TIMES)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_least_value_that_enough_values_do_not_exceed(values, percent):
    ordered = sorted(values)
    result = percentile(ordered, percent)
    at_most = sum(value <= result for value in ordered)
    less = sum(value < result for value in ordered)
    assert at_most * 100 >= percent * len(ordered)
    assert less * 100 < percent * len(ordered)


def test_the_percentile_of_no_values_is_zero():
    assert percentile([], 99) == 0.0


def test_the_table_has_a_row_for_each_run_with_the_swept_values():
    key = "routing.cache_aware.cache_threshold"
    head, rows = table([run(settings={key: 0.3}), run(settings={key: 0.5})])
    assert head[:2] == ["POLICY", key.upper()]
    assert [row[1] for row in rows] == ["0.3", "0.5"]
    assert rows[0][2:7] == ["9", "1", "2", "36.5", "1.25"]
    assert rows[0][-1] == "1,234"
    assert {len(row) for row in rows} == {len(head)}


def test_goodput_is_a_column_if_a_deadline_was_given():
    head, rows = table([run(goodput=1.5)])
    assert (head[-1], rows[0][-1]) == ("GOODPUT/s", "1.50")


def test_json_has_the_documented_keys():
    document = as_json(7, 4, Facts(10, 5.0, 2.0, 60.0, 0.4), [run()])
    assert list(document) == ["seed", "workers", "workload", "runs"]
    assert document["runs"][0]["ttft_ms"] == TIMES


def test_the_chart_is_svg_with_names_as_text_and_without_scripts():
    runs = [run("a<b"), run(settings={"routing.prefix_hash.load_factor": 2})]
    root = ET.fromstring(svg("Title", "note", runs))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts.count("a<b") == texts.count("cache_aware load_factor=2") == 5
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    widths = [float(bar.get("width")) for bar in root.iter() if bar.tag.endswith("rect")]
    assert max(widths) == pytest.approx(460)
