"""The same steps with pairs, with and without the fast path, have equal results."""

import contextlib

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.dataplane.both_drivers import flush_after_each_event, worker_sockets
from tests.dataplane.disaggregation.pair_world import NAMES, PREFILL, response_with, world_of
from tests.dataplane.drivers.test_fast_path_model import (
    MEANWHILE,
    PLANS,
    REQUESTS,
    SIMILAR,
    Course,
    configured,
)
from tests.example_counts import examples
from tests.weighted_choice import weighted

KV_ERROR = b'{"error": {"message": "KVTransferError: gone"}}'
RESPONSES = weighted(
    (6, st.just((response_with(PREFILL),))),
    (1, PLANS),
    (1, st.sampled_from([
        (response_with(KV_ERROR, b"500 Oh"),),
        # The id of a request whose random numbers are 0.
        (response_with(b'{"id": "%b"}' % (b"0" * 32)),),
        (response_with(PREFILL)[:60], response_with(PREFILL)[60:]),
    ])),
)  # fmt: skip
WHO, AT = st.integers(0, 2), st.integers(0, 3)
# Also with the ids that clients of SGLang send.
SIMILAR_WITH_ID = SIMILAR | st.tuples(
    st.just(b"one"), st.sampled_from([b'{"rid": "mine"}', b'{"rid": ["a"]}', b'{"rid": ""}'])
)
STEPS = weighted(
    (4, st.tuples(st.just("exchange"), st.integers(0, 1), SIMILAR_WITH_ID, RESPONSES, RESPONSES)),
    (2, st.tuples(st.just("send_similar"), st.integers(0, 1), SIMILAR)),
    (1, st.tuples(st.just("send"), WHO, REQUESTS, MEANWHILE)),
    (3, st.tuples(st.just("respond_from"), st.sampled_from(sorted(NAMES)), RESPONSES)),
    (1, st.tuples(st.just("respond"), RESPONSES)),
    (2, st.just(("continue_response",))),
    (1, st.tuples(st.just("disconnect"), WHO, st.sampled_from(["half", "whole"]))),
    (1, st.just(("drain",))),
    (1, st.tuples(st.just("disable"), AT, st.booleans())),
    (1, st.tuples(st.just("limit_inflight"), AT, st.integers(0, 1))),
    (1, st.tuples(st.just("set_api_key"), AT)),
    (1, st.tuples(st.just("change_role"), AT, st.sampled_from(["regular", "prefill", "decode"]))),
    (1, st.just(("remove",))),
    (1, st.tuples(st.just("set_version"), AT, st.sampled_from(["v1", "v2"]))),
    (1, st.tuples(st.just("fail"), AT, st.booleans())),
    (1, st.tuples(st.just("wait"), st.sampled_from([1, 6, 31, 400]))),
)
SERVER = st.sampled_from(
    ["", "", "half_close = 'answer'\n", "queue_size = 2\nqueue_timeout_secs = 5\n",
     "request_timeout_secs = 5\n", "max_held_bytes = 600\n"]
)  # fmt: skip
ROUTING = st.sampled_from(
    [
        "",
        "policy = 'least_request'\n",
        "max_total_retries = 1\nmax_worker_retries = 1\n",
        "[routing.disaggregation]\nfallback = 'refuse'\ntransfer_timeout_secs = 5\n",
        "[routing.disaggregation]\nmin_uncached_tokens = 10\n",
    ]
)


# Connector and number of ranks.
WORLDS = [("sglang", 0), ("nixl", 0), ("mooncake", 0), ("sglang", 2), ("nixl", 2)]


class PairCourse(Course):
    def exchange(self, who, request, prefill, decode=None):
        self.send_similar(who, request)
        self.respond(prefill)
        for _ in prefill[1:]:
            self.continue_response()
        if decode is not None:
            self.respond(decode)
            for _ in decode[1:]:
                self.continue_response()

    def respond_from(self, name, plan):
        self.world.worker_responds(*plan, by=name)

    def change_role(self, at, role):
        self.change(at, role=role)


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        sockets = worker_sockets(tmp_path, "".join(NAMES))
        yield {name: stack.enter_context(sock) for name, sock in sockets.items()}


def run_course(listeners, case, *, use_fast_path):
    kind, (server, routing), at_once, ids, steps = case
    with pytest.MonkeyPatch.context() as patch:
        if at_once:
            flush_after_each_event(patch)
        patch.setenv("KEY_OF_A_WORKER", "secret")
        unpatched = world_of(*kind)(
            listeners, configured(server, routing), use_fast_path=use_fast_path
        )
        with unpatched.patched() as world:
            course = PairCourse(world, server, routing, ids=ids, traced=False)
            course.run(False, steps)
            assert not world.dataplane.loop.tasks
            assert world.dataplane.in_flight == 0
            assert not any(worker.in_flight for worker in world.fleet.workers)
            assert len(world.log) == sum(world.dataplane.services.totals.ended.values())
    return course


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(
        st.sampled_from(WORLDS),
        st.tuples(SERVER, ROUTING),
        st.booleans(),
        st.booleans(),
        st.lists(STEPS, min_size=4, max_size=16),
    )
)
def test_pairs_have_the_results_of_the_slow_path(listeners, case):
    slow, fast = (
        run_course(listeners, case, use_fast_path=use_fast_path) for use_fast_path in (False, True)
    )
    for expected, actual in zip(slow.snapshots, fast.snapshots, strict=True):
        assert actual == expected
    assert slow.world.began == 0
    event(f"began {min(fast.world.began // 2 * 2, 10)}")
    event(f"whole {min((fast.world.began - fast.world.handed_over) // 2 * 2, 10)}")
