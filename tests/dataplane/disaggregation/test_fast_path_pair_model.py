"""Pairs on the fast path against the driver alone: the same steps have equal results."""

import contextlib

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from omni_proxy.dataplane.loop import event_loop
from tests.dataplane.both_drivers import worker_sockets
from tests.dataplane.disaggregation.pair_world import NAMES, PREFILL, answer, world_of
from tests.dataplane.exchange.test_fast_path_model import (
    BESIDES,
    LIKE,
    PLANS,
    REQUESTS,
    Course,
    configured,
)
from tests.example_counts import examples
from tests.weighted_choice import weighted

KV_ERROR = b'{"error": {"message": "KVTransferError: gone"}}'
ANSWERS = weighted(
    (6, st.just((answer(PREFILL),))),
    (1, PLANS),
    (1, st.sampled_from([
        (answer(KV_ERROR, b"500 Oh"),),
        (answer(b'{"id": "%b"}' % (b"0" * 32)),),  # of a request whose random numbers are 0
        (answer(PREFILL)[:60], answer(PREFILL)[60:]),
    ])),
)  # fmt: skip
WHO, AT = st.integers(0, 2), st.integers(0, 3)
# As clients of SGLang write them, too.
LIKE_WITH_ID = LIKE | st.tuples(
    st.just(b"one"), st.sampled_from([b'{"rid": "mine"}', b'{"rid": ["a"]}', b'{"rid": ""}'])
)
STEPS = weighted(
    (4, st.tuples(st.just("exchange"), st.integers(0, 1), LIKE_WITH_ID, ANSWERS, ANSWERS)),
    (2, st.tuples(st.just("like"), st.integers(0, 1), LIKE)),
    (1, st.tuples(st.just("ask"), WHO, REQUESTS, BESIDES)),
    (3, st.tuples(st.just("answer_of"), st.sampled_from(sorted(NAMES)), ANSWERS)),
    (1, st.tuples(st.just("answer"), ANSWERS)),
    (2, st.just(("more",))),
    (1, st.tuples(st.just("leaves"), WHO, st.sampled_from(["half", "whole"]))),
    (1, st.just(("drain",))),
    (1, st.tuples(st.just("disable"), AT, st.booleans())),
    (1, st.tuples(st.just("bound"), AT, st.integers(0, 1))),
    (1, st.tuples(st.just("key"), AT)),
    (1, st.tuples(st.just("change_role"), AT, st.sampled_from(["regular", "prefill", "decode"]))),
    (1, st.just(("remove",))),
    (1, st.tuples(st.just("version"), AT, st.sampled_from(["v1", "v2"]))),
    (1, st.tuples(st.just("fails"), AT, st.booleans())),
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


WORLDS = [("sglang", 0), ("nixl", 0), ("mooncake", 0), ("sglang", 2), ("nixl", 2)]  # and ranks


class PairCourse(Course):
    def exchange(self, who, request, prefill, decode=None):
        self.like(who, request)
        self.answer(prefill)
        for _ in prefill[1:]:
            self.more()
        if decode is not None:
            self.answer(decode)
            for _ in decode[1:]:
                self.more()

    def answer_of(self, name, plan):
        self.world.answer(*plan, by=name)

    def change_role(self, at, role):
        self.change(at, role=role)


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        sockets = worker_sockets(tmp_path, "".join(NAMES))
        yield {name: stack.enter_context(each) for name, each in sockets.items()}


def course(listeners, reported, *, short):
    kind, (server, routing), at_once, ids, steps = reported
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_loop, "MAX_PENDING_WRITERS", 1 if at_once else 32)
        patch.setenv("KEY_OF_A_WORKER", "secret")
        made = world_of(*kind)(listeners, configured(server, routing), short=short)
        with made.at_work() as world:
            made = PairCourse(world, server, routing, ids=ids, traced=False)
            made.go(False, steps)
            assert not world.dataplane.loop.tasks
            assert world.dataplane.in_flight == 0
            assert not any(worker.in_flight for worker in world.fleet.workers)
            assert len(world.log) == sum(world.dataplane.services.totals.ended.values())
    return made


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
def test_pairs_on_the_fast_path_have_the_results_of_the_driver(listeners, reported):
    long, short = (course(listeners, reported, short=short) for short in (False, True))
    for theirs, ours in zip(long.seen, short.seen, strict=True):
        assert ours == theirs
    assert long.world.began == 0
    event(f"began {min(short.world.began // 2 * 2, 10)}")
    event(f"whole {min((short.world.began - short.world.handed_over) // 2 * 2, 10)}")
