import pytest

from omni_proxy.routing.pick import eligible_workers
from omni_proxy.routing.routes import BOTH_ENGINES
from tests.fleet.entries import NOW, entry, heal

QUEUED = "queue_size = 100\n"


def test_requests_above_the_limit_wait_and_are_admitted_in_order(room_of):
    room = room_of(entry("a"), config=QUEUED + "max_inflight = 2")
    waiters = [room.arrive() for _ in range(5)]
    assert (room.admitted, room.queue.waiting) == (waiters[:2], 3)
    assert [waiter.phase for waiter in waiters[2:]] == ["queue"] * 3
    waiters[1].finish()
    room.run_ready_tasks()
    assert room.admitted == [waiters[0], waiters[2]]
    waiters[0].finish()
    waiters[2].finish()
    room.run_ready_tasks()
    assert (room.admitted, room.queue.waiting) == (waiters[3:], 0)
    assert (room.dataplane.inflight.peak_in_flight, room.queue.peak_waiting) == (2, 3)


def test_free_capacity_is_handed_to_a_waiter_first(room_of):
    room = room_of(entry("a", max_inflight=1), config=QUEUED)
    first, waiting = room.arrive(), room.arrive()
    first.finish()
    arrived = room.arrive()  # `waiting` has not been resumed yet
    room.run_ready_tasks()
    assert (room.admitted, room.queue.waiting) == ([waiting], 1)
    waiting.finish()
    room.run_ready_tasks()
    assert room.admitted == [arrived]


def test_a_waiter_for_one_model_does_not_block_another_model(room_of):
    room = room_of(
        entry("a", model="m", max_inflight=1), entry("b", model="n", max_inflight=1), config=QUEUED
    )
    m, n = room.arrive("m"), room.arrive("n")
    more_m, more_n = room.arrive("m"), room.arrive("n")
    n.finish()
    room.run_ready_tasks()
    assert room.admitted == [m, more_n]
    m.finish()
    room.run_ready_tasks()
    assert room.admitted == [more_n, more_m]


def test_a_waiter_for_a_worker_gives_up_its_slot(room_of):
    room = room_of(
        entry("a", model="m", disabled=True), entry("b", model="n"),
        config=QUEUED + "max_inflight = 1",
    )  # fmt: skip
    waiter = room.arrive("m")
    assert (room.queue.waiting, room.dataplane.in_flight) == (1, 0)
    other = room.arrive("n")
    assert room.admitted == [other]
    room.fleet.apply([entry("a", model="m"), entry("b", model="n")], NOW)
    room.run_ready_tasks()
    assert room.admitted == [other]  # there is a worker, but no slot
    other.finish()
    room.run_ready_tasks()
    assert room.admitted == [waiter]


def test_every_change_of_the_fleet_admits_the_waiters_that_it_helps(room_of):
    room = room_of(entry("a"), config=QUEUED, healthy=False)
    (worker,) = room.fleet.workers
    waiting = room.arrive()
    heal(room.fleet, worker)
    room.run_ready_tasks()
    assert room.admitted == [waiting]
    room.fleet.cordon(worker, "launch")
    held = room.arrive()
    assert room.queue.waiting == 1
    room.fleet.uncordon(worker, "launch")
    room.run_ready_tasks()
    assert room.admitted == [waiting, held]


@pytest.mark.parametrize(
    ("entries", "model", "code"),
    [
        ([entry("a", capabilities=frozenset({"speech"}))], None, "no_capable_worker"),
        ([entry("a", model="m")], "n", "model_not_found"),
    ],
)
def test_a_request_that_no_worker_will_serve_is_rejected_at_once(room_of, entries, model, code):
    room = room_of(*entries, config=QUEUED)
    assert room.arrive(model).refusal.code == code


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([], "no_workers"),
        ([entry("a", disabled=True)], "all_disabled"),
        ([entry("a")], "none_healthy"),
    ],
)
def test_without_a_queue_no_request_waits(room_of, entries, code):
    room = room_of(*entries, healthy=False)
    assert room.arrive().refusal.code == code
    assert room.queue.waiting == 0


def test_without_a_queue_a_request_above_the_limit_is_rejected(room_of):
    room = room_of(entry("a"), config="max_inflight = 1")
    room.arrive()
    refusal = room.arrive().refusal
    assert (refusal.status, refusal.code, refusal.type) == (503, 503, "overloaded_error")
    assert refusal.message == "router overloaded: max in-flight requests reached"
    assert (refusal.extra["reason"], room.dataplane.inflight.rejected) == ("max_inflight", 1)


def test_a_full_queue_rejects_requests(room_of):
    room = room_of(entry("a"), config="queue_size = 2\nmax_inflight = 1")
    for _ in range(3):
        room.arrive()
    refusal = room.arrive().refusal
    assert (refusal.status, refusal.type) == (503, "overloaded_error")
    assert refusal.extra["reason"] == "queue_full"
    assert ("retry-after", "1") in refusal.headers
    assert (room.queue.waiting, room.dataplane.inflight.rejected) == (2, 1)


@pytest.mark.parametrize(
    ("entries", "config", "reason"),
    [
        ([entry("a")], "max_inflight = 1", "queue_timeout"),
        ([entry("a", max_inflight=1)], "", "all_full"),
    ],
)
def test_the_error_of_a_queue_timeout_names_what_the_request_waited_for(
    room_of, entries, config, reason
):
    room = room_of(*entries, config=f"queue_timeout_secs = 7\n{QUEUED}{config}")
    room.arrive()
    late = room.arrive()
    assert late.phase_deadline == room.dataplane.loop.now + 7
    late.on_phase_timeout()
    assert (late.refusal.status, late.refusal.extra["reason"]) == (503, reason)
    assert "waited 7 s in the queue" in late.refusal.message
    assert (room.queue.waiting, room.dataplane.inflight.rejected) == (0, 1)


OVERLOAD_429 = "overload_status = 429\n"


@pytest.mark.parametrize(
    ("entries", "config", "status"),
    [
        ([entry("a")], "max_inflight = 1", 408),
        ([entry("a", max_inflight=1)], "", 408),
        ([entry("a", disabled=True)], "", 503),  # not available, rather than busy
    ],
)
def test_with_overload_status_429_a_timeout_in_the_queue_is_408(room_of, entries, config, status):
    room = room_of(*entries, config=f"{OVERLOAD_429}{QUEUED}{config}")
    room.arrive()
    late = room.arrive()
    late.on_phase_timeout()
    assert (late.refusal.status, late.refusal.code) == (status, status)
    assert late.refusal.headers == (("retry-after", "1"),)


@pytest.mark.parametrize(
    ("entries", "config"),
    [
        ([entry("a")], "max_inflight = 1"),
        ([entry("a", max_inflight=1)], ""),
        ([entry("a")], "max_inflight = 1\nqueue_size = 1"),
    ],
)
def test_with_overload_status_429_a_full_fleet_responds_429(room_of, entries, config):
    room = room_of(*entries, config=OVERLOAD_429 + config)
    for _ in range(room.dataplane.settings.config.server.queue_size + 1):
        room.arrive()
    refusal = room.arrive().refusal
    assert refusal.status == 429
    assert refusal.headers == (("retry-after", "1"),)
    room.reconfigure(config)
    assert room.arrive().refusal.status == 503


def test_the_total_time_in_the_queue_is_limited(room_of):
    room = room_of(
        entry("a", max_inflight=1), config=f"queue_timeout_secs = 7\n{QUEUED}max_inflight = 1"
    )
    first, second = room.arrive(), room.arrive()
    room.dataplane.loop.now += 5
    room.fleet.apply([], NOW)
    first.finish()  # a slot is free, but there is no worker
    room.run_ready_tasks()
    assert (room.queue.waiting, second.exchange.queued_secs) == (1, 5)
    assert second.phase_deadline == pytest.approx(room.dataplane.loop.now + 2)


def test_an_admitted_waiter_cannot_time_out_before_it_runs(room_of):
    room = room_of(entry("a", max_inflight=1), config=QUEUED)
    first, waiting = room.arrive(), room.arrive()
    first.finish()
    assert waiting.phase_deadline == float("inf")


def test_an_admitted_waiter_that_disconnects_releases_its_worker(room_of):
    room = room_of(entry("a", max_inflight=1), config=QUEUED)
    first, leaving, staying = room.arrive(), room.arrive(), room.arrive()
    first.finish()
    leaving.disconnect()
    room.run_ready_tasks()
    assert (room.admitted, room.fleet.workers[0].in_flight) == ([staying], 1)


def test_a_raised_limit_admits_at_once(room_of):
    room = room_of(entry("a"), config=QUEUED + "max_inflight = 1")
    waiters = [room.arrive() for _ in range(4)]
    room.reconfigure(QUEUED + "max_inflight = 3")
    room.run_ready_tasks()
    assert room.admitted == waiters[:3]


def test_lines_are_split_when_workers_begin_to_have_models(room_of):
    room = room_of(entry("a", max_inflight=1), config=QUEUED)
    room.arrive("m")
    n, m = room.arrive("n"), room.arrive("m")
    room.fleet.apply([entry("b", model="m")], NOW)
    heal(room.fleet, room.fleet.workers[0])
    room.run_ready_tasks()
    assert room.admitted[1:] == [m]
    assert room.queue.waiting == 1
    n.disconnect()


def test_a_half_open_worker_takes_one_waiter(room_of):
    room = room_of(entry("a"), config=QUEUED)
    (worker,) = room.fleet.workers
    for _ in range(3):
        room.fleet.observe_request_failure(worker, status=502, error="bad", at=NOW)
    waiters = [room.arrive() for _ in range(5)]
    heal(room.fleet, worker)
    room.run_ready_tasks()
    assert (room.admitted, room.queue.waiting) == (waiters[:1], 4)
    room.fleet.observe_success(worker, waiters[0].exchange.half_open_id)
    room.run_ready_tasks()
    assert room.admitted == waiters


def test_the_cost_of_admitting_does_not_depend_on_the_number_of_waiters(room_of, monkeypatch):
    room = room_of(entry("a", max_inflight=1), config="queue_size = 10000")
    waiters = [room.arrive(f"model {number}") for number in range(10_001)]
    calls = []
    monkeypatch.setattr(
        "omni_proxy.dataplane.upstream.balancer.eligible_workers",
        lambda *args: calls.append(1) or eligible_workers(*args),
    )
    for number in range(10_000):
        waiters[number].finish()
        room.run_ready_tasks()
        assert room.admitted == [waiters[number + 1]]
    assert len(calls) < 20_000  # for the admitted waiter and the one after it


def test_empty_lines_do_not_accumulate(room_of):
    room = room_of(entry("a"), config=QUEUED + "max_inflight = 1")
    room.arrive()
    for _ in range(1000):
        room.arrive().disconnect()
    assert len(room.queue._full) < 100
    stays = room.arrive()
    room.admitted[0].finish()
    room.run_ready_tasks()
    assert room.admitted == [stays]


def pair(**bounds):
    return (
        entry("p", role="prefill", max_inflight=bounds.get("prefill", 0)),
        entry("d", role="decode", max_inflight=bounds.get("decode", 0)),
    )


@pytest.mark.parametrize("full", ["prefill", "decode"])
def test_a_request_in_two_legs_waits_until_both_pools_have_room(room_of, full):
    room = room_of(*pair(**{full: 1}), config=QUEUED)
    first = room.arrive(legs=BOTH_ENGINES)
    second = room.arrive(legs=BOTH_ENGINES)
    assert (room.admitted, room.queue.waiting) == ([first], 1)
    assert [worker.in_flight for worker in room.fleet.workers] == [1, 1]
    first.finish()
    room.run_ready_tasks()
    assert (room.admitted, room.queue.waiting) == ([second], 0)
    assert [worker.in_flight for worker in room.fleet.workers] == [1, 1]
    second.finish()
    assert [worker.in_flight for worker in room.fleet.workers] == [0, 0]


def test_a_request_in_two_legs_waits_for_a_missing_worker(room_of):
    prefill, decode = pair()
    room = room_of(decode, config=QUEUED)
    waiter = room.arrive(legs=BOTH_ENGINES)
    assert (room.admitted, room.queue.waiting) == ([], 1)
    room.fleet.apply([prefill, decode], NOW)
    heal(room.fleet, room.fleet.workers[0])
    room.run_ready_tasks()
    assert room.admitted == [waiter]
    waiter.finish()


def test_a_request_in_two_legs_waits_while_the_weights_of_the_pools_differ(room_of):
    room = room_of(*pair(), config=QUEUED)
    prefill, decode = room.fleet.workers
    room.fleet.set_version(prefill, "v2", 2)
    waiter = room.arrive(legs=BOTH_ENGINES)
    assert (room.admitted, room.queue.waiting) == ([], 1)
    room.fleet.set_version(decode, "v2", 2)
    room.run_ready_tasks()
    assert room.admitted == [waiter]
    waiter.finish()


def test_a_change_of_role_does_not_affect_requests_in_flight(room_of):
    room = room_of(*pair(), config=QUEUED)
    prefill, decode = room.fleet.workers
    first = room.arrive(legs=BOTH_ENGINES)
    room.fleet.apply([entry("p", role="decode"), entry("d", role="prefill")], NOW)
    assert (prefill.role, prefill.in_flight, decode.in_flight) == ("decode", 1, 1)
    second = room.arrive(legs=BOTH_ENGINES)
    assert (second.exchange.worker, second.exchange.legs.prefill.worker) == (prefill, decode)
    first.finish()
    second.finish()
    assert [worker.in_flight for worker in room.fleet.workers] == [0, 0]
