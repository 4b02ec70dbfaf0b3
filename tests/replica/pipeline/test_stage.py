import queue
import threading

import pytest

from omni_proxy.replica.pipeline.stage import CallerError, FunctionScheduler
from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    Admin,
    OmniRequest,
    Result,
    ResultChunk,
    Shutdown,
    StageFailure,
    StagePayload,
    StageStats,
    StreamChunk,
    Submit,
)


class Running:
    """Runs a scheduler in a thread. A test can wait for its messages."""

    def __init__(self, scheduler):
        self.inbox, self.outlet = queue.SimpleQueue(), queue.SimpleQueue()
        self.thread = threading.Thread(target=scheduler.run, args=(self.inbox, self.emit))
        self.thread.start()

    def emit(self, message):
        if not isinstance(message, StageStats):
            self.outlet.put(message)

    def submit(self, request_id, data=None, fed=False):
        payload = StagePayload(request_id, OmniRequest("x"), data)
        self.inbox.put(Submit(payload, "before" if fed else "", fed))

    def next(self):
        return self.outlet.get(timeout=60)

    def stop(self):
        self.inbox.put(Shutdown())
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.outlet.empty()


@pytest.fixture
def run():
    started = []

    def start(function, **keys):
        started.append(Running(FunctionScheduler("s", function, **keys)))
        return started[-1]

    yield start
    for running in started:
        running.stop()


def test_the_chunks_of_a_function_precede_its_result(run):
    def work(payload, emit_chunk, aborted):
        emit_chunk({"text": "a"})
        emit_chunk({"audio_data": b"1234"})
        return {"text": payload.data}

    running = run(work)
    running.submit("r", "whole")
    assert [running.next() for _ in range(3)] == [
        ResultChunk("r", "s", {"text": "a"}, 0, "text"),
        ResultChunk("r", "s", {"audio_data": b"1234"}, 1, "audio"),
        Result("r", "s", {"text": "whole"}),
    ]


def test_an_error_fails_only_its_own_request(run):
    def work(payload, emit_chunk, aborted):
        if payload.data == "caller":
            raise CallerError("too long")
        return {"x": 1 / payload.data}

    running = run(work)
    running.submit("a", "caller")
    running.submit("b", 0)
    running.submit("c", 2)
    assert running.next() == StageFailure("a", "s", "too long", "caller")
    assert running.next() == StageFailure("b", "s", "ZeroDivisionError: division by zero", "server")
    assert running.next() == Result("c", "s", {"x": 0.5})


def test_an_aborted_function_sees_the_abort_and_emits_nothing(run):
    begun, saw_abort, pause = threading.Event(), threading.Event(), threading.Event()

    def work(payload, emit_chunk, aborted):
        if payload.request_id == "next":
            return {}
        begun.set()
        while not aborted():
            pause.wait(0.001)
        emit_chunk({"text": "late"})
        saw_abort.set()
        return {"text": "late"}

    running = run(work)
    running.submit("r")
    assert begun.wait(30)
    running.inbox.put(Abort("r"))
    running.inbox.put(Abort("r"))
    assert saw_abort.wait(30)
    running.submit("next")
    assert running.next() == Result("next", "s", {})


def test_a_waiting_request_can_be_aborted_before_it_starts(run):
    go, ran = threading.Event(), []

    def work(payload, emit_chunk, aborted):
        ran.append(payload.request_id)
        go.wait(30)
        return {}

    running = run(work)
    for request_id in ("a", "b", "c"):
        running.submit(request_id)
    running.inbox.put(Abort("b"))
    running.inbox.put(Abort("unknown"))
    running.submit("d")
    go.set()
    assert [running.next().request_id for _ in range(3)] == ["a", "c", "d"]
    assert ran == ["a", "c", "d"]


def test_concurrency_is_the_configured_number(run):
    together = threading.Barrier(3)

    def work(payload, emit_chunk, aborted):
        together.wait(30)
        return {}

    running = run(work, concurrency=3)
    for request_id in ("a", "b", "c"):
        running.submit(request_id)
    assert {running.next().request_id for _ in range(3)} == {"a", "b", "c"}


def test_a_fed_request_gets_its_chunks_in_order_and_ends_with_the_last(run):
    class Joined:
        def __init__(self):
            self.texts = []

        def feed(self, chunk):
            self.texts.append(chunk["text"])

        def finish(self):
            return {"text": "".join(self.texts)}

    running = run(None, open_feed=lambda payload, emit_chunk, aborted: Joined(), concurrency=2)
    running.submit("a", fed=True)
    running.submit("b", fed=True)
    for number in range(20):
        for request_id in ("a", "b"):
            text, last = f"{request_id}{number} ", number == 19
            running.inbox.put(StreamChunk(request_id, "d", {"text": text}, number, last))
    results = {message.request_id: message.data for message in (running.next(), running.next())}
    assert results["a"]["text"] == "".join(f"a{number} " for number in range(20))
    assert results["b"]["text"] == "".join(f"b{number} " for number in range(20))


def test_a_fed_request_to_a_stage_that_cannot_be_fed_fails(run):
    running = run(lambda *_: {})
    running.submit("r", fed=True)
    assert "cannot be streamed into" in running.next().error


def test_messages_that_a_function_does_not_support_are_ignored(run):
    running = run(lambda *_: {"ok": True})
    running.inbox.put(Admin("o", "model_info"))
    running.inbox.put(StreamChunk("unknown", "d", {}))
    running.submit("r")
    assert running.next() == Result("r", "s", {"ok": True})


def test_shutdown_aborts_running_functions():
    begun, pause = threading.Event(), threading.Event()

    def work(payload, emit_chunk, aborted):
        begun.set()
        while not aborted():
            pause.wait(0.001)
        return {}

    running = Running(FunctionScheduler("s", work))
    running.submit("r")
    assert begun.wait(30)
    assert running.stop()


def test_the_gauges_count_running_and_waiting_requests():
    gauges = []
    go = threading.Event()
    outlet = queue.SimpleQueue()
    inbox = queue.SimpleQueue()
    for request_id in ("a", "b"):
        inbox.put(Submit(StagePayload(request_id, OmniRequest("x"), None)))

    def emit(message):
        if isinstance(message, StageStats):
            gauges.append(message.values)
        else:
            outlet.put(message)

    def work(payload, emit_chunk, aborted):
        go.wait(30)
        return {}

    thread = threading.Thread(target=FunctionScheduler("s", work).run, args=(inbox, emit))
    thread.start()
    go.set()
    outlet.get(timeout=60)
    outlet.get(timeout=60)
    inbox.put(Shutdown())
    thread.join(30)
    assert {"num_running_reqs": 0.0, "num_waiting_reqs": 0.0} in gauges
    assert all(values["num_running_reqs"] + values["num_waiting_reqs"] <= 2 for values in gauges)


def test_aborted_requests_are_not_counted_in_the_gauges():
    begun, outlet = threading.Event(), queue.SimpleQueue()

    def work(payload, emit_chunk, aborted):
        begun.set()
        while not aborted():
            begun.wait(0.001)
        return {}

    inbox = queue.SimpleQueue()
    scheduler = FunctionScheduler("s", work)
    thread = threading.Thread(target=scheduler.run, args=(inbox, outlet.put))
    thread.start()
    for request_id in ("works", "waits"):
        inbox.put(Submit(StagePayload(request_id, OmniRequest("x"), None)))
    assert begun.wait(30)
    for request_id in ("works", "waits"):
        inbox.put(Abort(request_id))
    inbox.put(Shutdown())
    thread.join(30)
    stats = [outlet.get_nowait() for _ in range(outlet.qsize())]
    assert all(isinstance(message, StageStats) for message in stats)
    assert stats[-1].values == {"num_running_reqs": 0, "num_waiting_reqs": 0}
