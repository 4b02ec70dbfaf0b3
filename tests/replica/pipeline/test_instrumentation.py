import json
import queue
import threading

import pytest

from omni_proxy.replica.pipeline.instrumentation import InstrumentedEmit, InstrumentedInbox
from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    OmniRequest,
    ProfilerStart,
    ProfilerStop,
    Result,
    ResultChunk,
    Shutdown,
    StageFailure,
    StagePayload,
    StreamChunk,
    Submit,
)
from omni_proxy.replica.profiling.recorder import EventRecorder


@pytest.fixture
def events(monkeypatch, tmp_path):
    recorder = EventRecorder()
    monkeypatch.setattr(f"{InstrumentedInbox.__module__}.STAGE_EVENTS", recorder)

    def read():
        recorder.stop()
        return [
            (e["event_name"], e["stage"], e["metadata"])
            for path in sorted(tmp_path.glob("events_*"))
            for e in map(json.loads, path.read_text().splitlines())
        ]

    read.start = ProfilerStart("run", "", str(tmp_path), False)
    yield read
    recorder.stop()


def submit(request_id="r", from_stage=""):
    return Submit(StagePayload(request_id, OmniRequest("x"), {}), from_stage)


def test_the_scheduler_gets_all_messages_except_those_of_the_profiler(events):
    inbox = InstrumentedInbox("decode")
    sent = [submit(), Abort("r"), Shutdown()]
    for message in (events.start, sent[0], ProfilerStop(None), sent[1], sent[2]):
        inbox.put(message)
    assert [inbox.get(), inbox.get_nowait(), inbox.get(timeout=1)] == sent


def test_an_inbox_with_only_profiler_messages_is_empty(events):
    inbox = InstrumentedInbox("decode")
    inbox.put(events.start)
    with pytest.raises(queue.Empty):
        inbox.get_nowait()
    inbox.put(ProfilerStop(None))
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0)


def test_a_waiting_scheduler_is_not_woken_by_the_profiler(events):
    inbox, received = InstrumentedInbox("decode"), []
    thread = threading.Thread(target=lambda: received.append(inbox.get()))
    thread.start()
    inbox.put(events.start)
    inbox.put(Shutdown())
    thread.join(timeout=10)
    assert received == [Shutdown()]


def test_received_and_sent_messages_are_recorded(events):
    inbox = InstrumentedInbox("decode")
    emitted = []
    emit = InstrumentedEmit("decode", emitted.append)
    for message in (
        events.start, submit(), submit("q", "prepare"), StreamChunk("q", "a", {}, 3), Shutdown(),
    ):  # fmt: skip
        inbox.put(message)
    while not isinstance(inbox.get(), Shutdown):
        pass
    sent = [
        ResultChunk("r", "decode", {}, 0), ResultChunk("r", "decode", {}, 1, "audio"),
        Result("r", "decode", {}), StageFailure("q", "decode", "why"),
    ]  # fmt: skip
    for message in sent:
        emit(message)
    assert emitted == sent
    recorded = events()
    assert [name for name, _, _ in recorded] == [
        "stage_input_received", "stage_input_received", "stage_stream_chunk_received",
        "stage_first_stream_chunk_sent", "stage_stream_chunk_sent", "stage_stream_chunk_sent",
        "stage_complete",
    ]  # fmt: skip
    assert recorded[0][2] == {"from_stage": "coordinator", "kind": "submit"}
    assert recorded[1][2] == {"from_stage": "prepare", "kind": "payload"}
    assert recorded[-1][2] == {"terminal": True, "error": "why"}


def test_a_torch_trace_has_the_operations_of_its_stage(events, tmp_path):
    torch = pytest.importorskip("torch")
    inbox, other = InstrumentedInbox("decode"), InstrumentedInbox("speak")
    template = str(tmp_path / "{run_id}" / "trace_{stage}")
    for stage_inbox in (inbox, other):  # a second torch profiler would end the process
        stage_inbox.put(ProfilerStart("run", template, None, True))
        stage_inbox.put(Abort("a"))
        stage_inbox.get()
    torch.ones(8, 8).matmul(torch.ones(8, 8))
    inbox.put(ProfilerStop("another"))
    for stage_inbox in (other, inbox):
        stage_inbox.put(ProfilerStop("run"))
        stage_inbox.put(Abort("b"))
        stage_inbox.get()
    (trace,) = (tmp_path / "run").iterdir()
    assert trace.name.startswith("trace_decode_pid")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::matmul" in names
