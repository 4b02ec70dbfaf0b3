import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.parse import parse
from omni_proxy.discovery.endpoints import DiscoveryState
from omni_proxy.discovery.pods import (
    DELETING,
    GONE,
    HAS_ENDED,
    NOT_READY,
    UNSELECTED,
    LineBuffer,
    PodState,
    walk_list,
)
from tests.discovery_watch.api_server import pod

TABLE = '[[discover]]\napi_server = "https://k"\nnamespace = "*"\n'


def entry(more: str = ""):
    return parse(TABLE + more).discover[0]


def state(more: str = "") -> PodState:
    return PodState(entry(more))


def only(state: PodState):
    (endpoint,) = state.endpoints
    return endpoint


def read(thing: dict, more: str = ""):
    found = state(more).read(thing)
    assert found is not None
    return [endpoint.found.entry for endpoint in found.endpoints], found


def with_status(thing: dict, **status: object) -> dict:
    return {**thing, "status": {**thing["status"], **status}}


def with_metadata(thing: dict, **metadata: object) -> dict:
    return {**thing, "metadata": {**thing["metadata"], **metadata}}


def test_a_pod_is_a_worker_at_its_address():
    (worker,), found = read(pod("a", ip="10.1.2.3"), 'model = "m"\nrole = "decode"')
    assert (worker.url, worker.model, worker.role) == ("http://10.1.2.3:30000", "m", "decode")
    assert (found.uid, found.name) == ("uid-a", "default/a")
    (worker,), _ = read(pod("a", ip="fd00::1"))
    assert worker.url == "http://[fd00::1]:30000"


@pytest.mark.parametrize(
    ("annotations", "more", "ports"),
    [
        ({}, "port = 81", [81]),
        ({}, 'port = "http"', [30000]),
        ({"omni-proxy.dev/port": "82"}, 'port = "nowhere"', [82]),
        ({"omni-proxy.dev/port": "http"}, "", [30000]),
        ({"smg.ai/worker-ports": "83, 84,83"}, "", [83, 84]),
        ({"smg.ai/worker-ports": "83", "omni-proxy.dev/port": "85"}, "", [85]),
    ],
)
def test_ports_of_the_annotation_override_the_table(annotations, more, ports):
    workers, _ = read(pod("a", annotations=annotations), more)
    assert [worker.url for worker in workers] == [f"http://127.0.0.1:{port}" for port in ports]


def test_an_init_container_can_have_the_named_port():
    thing = pod("a")
    thing["spec"] = {
        "containers": [{}, 7],
        "initContainers": [{"ports": [{"name": "http", "containerPort": 9}]}],
    }
    (worker,), _ = read(thing, 'port = "http"')
    assert worker.url.endswith(":9")


def test_labels_and_annotations_set_role_model_and_kv_connector():
    more = 'role_label = "role"\nmodel_label = "model"\nmodel = "other"\nkv_connector = "nixl"'
    labels = {"role": "prefill", "model": "qwen"}
    annotations = {"sglang.ai/bootstrap-port": "9001"}
    (worker,), _ = read(pod("a", labels=labels, annotations=annotations), more)
    assert (worker.role, worker.model) == ("prefill", "qwen")
    assert (worker.bootstrap_port, worker.kv_connector) == (9001, "nixl")
    annotations = {
        "omni-proxy.dev/role": "decode", "omni-proxy.dev/model": "org/qwen", "smg.ai/kv-connector": "mooncake",
    }  # fmt: skip
    (worker,), _ = read(pod("a", labels=labels, annotations=annotations), more)
    assert (worker.role, worker.model, worker.kv_connector) == ("decode", "org/qwen", "mooncake")
    (worker,), _ = read(pod("a"), more)
    assert (worker.role, worker.model, worker.bootstrap_port) == ("", "other", 0)


@pytest.mark.parametrize(
    ("annotations", "ip", "reason"),
    [
        ({"omni-proxy.dev/port": "0"}, "10.0.0.1", '"0" is not a port'),
        ({"omni-proxy.dev/port": "grpc"}, "10.0.0.1", 'no container has a port named "grpc"'),
        ({"omni-proxy.dev/role": "boss"}, "10.0.0.1", '"boss" is not a role'),
        ({"omni-proxy.dev/kv-connector": "x"}, "10.0.0.1", '"x" is not a KV connector'),
        ({"vllm.ai/bootstrap-port": "x"}, "10.0.0.1", '"x" is not a port'),
        ({}, "169.254.169.254", "link-local address"),
    ],
)
def test_a_pod_that_cannot_be_used_is_a_problem_with_its_reason(annotations, ip, reason):
    pods = state()
    pods.apply("ADDED", pod("a", ip=ip, annotations=annotations), 0)
    assert list(pods.endpoints) == []
    assert reason in pods.problems["default/a"]
    pods.apply("MODIFIED", pod("a"), 1)
    assert (len(list(pods.endpoints)), pods.problems) == (1, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda thing: with_metadata(thing, deletionTimestamp="2026-01-01T00:00:00Z"), DELETING),
        (lambda thing: with_metadata(thing, labels={"app": "vllm"}), UNSELECTED),
        (lambda thing: with_status(thing, phase="Succeeded"), HAS_ENDED),
        (lambda thing: with_status(thing, phase="Failed"), HAS_ENDED),
        (lambda thing: with_status(thing, podIP=""), NOT_READY),
    ],
)
def test_a_worker_leaves_when_its_pod_ends_or_is_not_selected(change, reason):
    pods = state()
    pods.apply("ADDED", pod("a"), 0)
    (endpoint,) = pods.apply("MODIFIED", change(pod("a")), 1)
    assert (endpoint.state, endpoint.reason) == (DiscoveryState.LEAVING, reason)


def test_a_pod_that_is_not_ready_keeps_its_worker_without_new_requests():
    pods = state()
    pods.apply("ADDED", pod("a", ready=False), 0)
    assert only(pods).state is DiscoveryState.PENDING
    pods.apply("MODIFIED", pod("a"), 1)
    (endpoint,) = pods.apply("MODIFIED", pod("a", ready=False), 2)
    assert (endpoint.state, endpoint.reason) == (DiscoveryState.NOT_READY, NOT_READY)


def test_a_deleted_pod_leaves_even_if_its_last_object_is_ready():
    pods = state()
    pods.apply("ADDED", pod("a"), 0)
    (endpoint,) = pods.apply("DELETED", pod("a"), 1)
    assert (endpoint.state, endpoint.reason) == (DiscoveryState.LEAVING, GONE)


def test_a_new_pod_of_the_same_name_and_address_is_another_worker():
    pods = state()
    pods.apply("ADDED", pod("a", "one"), 0)
    pods.apply("DELETED", pod("a", "one"), 1)
    pods.apply("ADDED", pod("a", "two"), 2)
    assert {endpoint.uid: endpoint.state for endpoint in pods.endpoints} == {
        "one": DiscoveryState.LEAVING, "two": DiscoveryState.OPEN,
    }  # fmt: skip


def test_another_address_of_a_pod_is_another_worker():
    pods = state()
    pods.apply("ADDED", pod("a", ip="10.0.0.1"), 0)
    pods.apply("MODIFIED", pod("a", ip="10.0.0.2"), 1)
    assert {endpoint.url: endpoint.state.value for endpoint in pods.endpoints} == {
        "http://10.0.0.1:30000": "leaving", "http://10.0.0.2:30000": "open",
    }  # fmt: skip


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["metadata", "status", "uid", "labels", "conditions", "podIP", "type", "spec", "containers", "ports"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(thing=st.dictionaries(st.sampled_from(["metadata", "status", "spec"]), JUNK))
def test_after_any_object_the_next_pod_is_read(thing):
    pods = state('port = "http"')
    pods.apply("ADDED", thing, 0)
    thing["metadata"] = {
        "uid": "u",
        "name": 3,
        "labels": {"app": "sglang", "x": 1},
        "annotations": thing.get("spec"),
    }
    pods.apply("MODIFIED", thing, 1)
    pods.apply("ADDED", pod("b"), 2)
    assert {endpoint.uid for endpoint in pods.endpoints} <= {"u", "uid-b"}
    (endpoint,) = (endpoint for endpoint in pods.endpoints if endpoint.uid == "uid-b")
    assert endpoint.state is DiscoveryState.OPEN


UIDS = st.sampled_from("abc")
EVENT = st.tuples(
    st.sampled_from(["ADDED", "MODIFIED", "DELETED"]),
    UIDS,
    st.booleans(),
    st.sampled_from(["sglang", "x"]),
)
LISTED = st.dictionaries(
    UIDS, st.tuples(st.booleans(), st.sampled_from(["sglang", "x"])), max_size=3
)


@given(steps=st.lists(EVENT | LISTED, max_size=10))
def test_endpoints_that_stay_equal_those_of_a_new_list(steps):
    """Whether the state results from events or from lists."""
    pods, cluster = state(), {}

    def thing(uid, ready, app):
        return pod(uid, uid, ip=f"10.0.0.{ord(uid)}", ready=ready, labels={"app": app})

    for now, step in enumerate(steps):
        if isinstance(step, dict):
            cluster = dict(step)
            pods.replace([pods.read(thing(uid, *each)) for uid, each in cluster.items()], now)
        else:
            kind, uid, ready, app = step
            pods.apply(kind, thing(uid, ready, app), now)
            cluster.pop(uid, None)
            if kind != "DELETED":
                cluster[uid] = ready, app
        fresh = state()
        fresh.replace([fresh.read(thing(uid, *each)) for uid, each in cluster.items()], now)
        staying = {
            endpoint.uid: endpoint.state is DiscoveryState.OPEN
            for endpoint in pods.endpoints
            if endpoint.state is not DiscoveryState.LEAVING
        }
        assert staying == {
            endpoint.uid: endpoint.state is DiscoveryState.OPEN for endpoint in fresh.endpoints
        }


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
def test_an_invalid_list_is_refused(text):
    with pytest.raises(ValueError):
        list(walk_list(text))


def test_a_list_without_items_is_read():
    assert list(walk_list('{"items": null}')) == [("items", None)]
    assert list(walk_list("{}")) == []


@given(lines=st.lists(st.text(alphabet="ab ", max_size=5)), cuts=st.lists(st.integers(0, 40)))
def test_lines_are_whole_whatever_the_chunks(lines, cuts):
    data = "".join(f"{line}\n" for line in lines).encode()
    buffer, lines_read = LineBuffer(100), []
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(places):
        lines_read += buffer.feed(data[start:end])
    assert lines_read == [line.encode() for line in lines if line.strip()]


def test_a_line_without_an_end_is_refused():
    buffer = LineBuffer(10)
    buffer.feed(b"12345")
    with pytest.raises(ValueError, match="more than 10 bytes"):
        buffer.feed(b"678901")
