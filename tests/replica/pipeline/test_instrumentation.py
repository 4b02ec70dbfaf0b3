import json
import os
import queue
import threading

import numpy as np
import pytest

from omni_proxy.replica.pipeline.instrumentation import (
    EventRecorder,
    InstrumentedEmit,
    InstrumentedInbox,
)
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


@pytest.fixture(autouse=True)
def recorders(monkeypatch):
    """Stops every recorder of a test at its end, which closes its file."""
    created = []
    init = EventRecorder.__init__

    def record_instance(self, *args):
        init(self, *args)
        created.append(self)

    monkeypatch.setattr(EventRecorder, "__init__", record_instance)
    yield
    for recorder in created:
        recorder.stop()


def events_by_file(folder):
    events = {}
    for path in sorted(folder.iterdir()):
        events[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
    return events


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


def test_an_event_is_one_line_with_its_keys_in_order(tmp_path):
    recorder = EventRecorder()
    recorder.start("run", str(tmp_path / "new"), "decode")
    recorder.record("stage_complete", "r", "decode", {"terminal": True})
    path = tmp_path / "new" / f"events_decode_{os.getpid()}.jsonl"
    (text,) = path.read_text().splitlines()
    event = json.loads(text)
    assert list(event) == [
        "request_id", "stage", "event_name", "timestamp_ns", "run_id", "pid", "metadata",
    ]  # fmt: skip
    assert event["metadata"] == {"terminal": True}
    assert (event["run_id"], event["pid"]) == ("run", os.getpid())


def test_nothing_is_recorded_while_idle(tmp_path):
    recorder = EventRecorder("s")
    recorder.record("a", "r", "s")
    recorder.start("run", str(tmp_path))
    recorder.stop()
    recorder.record("a", "r", "s")
    assert events_by_file(tmp_path) == {f"events_s_{os.getpid()}.jsonl": []}


def test_stages_of_one_process_share_the_file_of_the_first(tmp_path):
    recorder = EventRecorder()
    recorder.start("run", str(tmp_path), "first")
    recorder.start("run", str(tmp_path), "second")
    recorder.record("a", "r", "second")
    ((name, events),) = events_by_file(tmp_path).items()
    assert name.startswith("events_first_")
    assert events[0]["stage"] == "second"


def test_a_new_run_replaces_the_old_one_and_is_stopped_by_its_own_id_only(tmp_path):
    recorder = EventRecorder("s")
    recorder.start("one", str(tmp_path / "1"))
    recorder.start("two", str(tmp_path / "2"))
    recorder.stop("one")
    recorder.record("a", "r", "s")
    recorder.stop("two")
    recorder.record("b", "r", "s")
    assert [
        e["event_name"] for e in events_by_file(tmp_path / "2")[f"events_s_{os.getpid()}.jsonl"]
    ] == ["a"]


def test_tensors_are_summarised_and_scalars_are_written(tmp_path):
    recorder = EventRecorder("s")
    recorder.start("run", str(tmp_path))
    recorder.record(
        "a", "r", "s", {"t": np.zeros((2, 3), np.float32), "n": np.array(4), "o": {1, 2}}
    )
    (event,) = events_by_file(tmp_path)[f"events_s_{os.getpid()}.jsonl"]
    assert event["metadata"] == {
        "t": {
            "__tensor_summary__": True, "type": "ndarray", "shape": [2, 3], "dtype": "float32",
            "device": "cpu",
        },
        "n": 4,
        "o": "{1, 2}",
    }  # fmt: skip


def test_events_that_cannot_be_encoded_are_dropped_and_counted(tmp_path):
    recorder = EventRecorder("s")
    recorder.start("run", str(tmp_path))
    cycle = {}
    cycle["self"] = cycle
    recorder.record("a", "r", "s", cycle)
    recorder.record("a", "r", "s", {(1, 2): 3})
    assert recorder.dropped == 2


def test_a_folder_that_cannot_be_created_is_logged_and_nothing_is_recorded(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    recorder = EventRecorder("s")
    recorder.start("run", str(tmp_path / "file" / "x"))
    recorder.record("a", "r", "s")
    assert recorder.run_id is None
    assert "profile_events_not_recorded" in caplog.text


@pytest.mark.parametrize("count", [8])
def test_lines_of_different_threads_are_not_mixed(tmp_path, count):
    recorder = EventRecorder("s")
    recorder.start("run", str(tmp_path))

    def write(number):
        for step in range(100):
            recorder.record("e", f"{number}-{step}", "s", {"pad": "x" * 300})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.stop()
    (events,) = events_by_file(tmp_path).values()
    assert len({event["request_id"] for event in events}) == 100 * count
