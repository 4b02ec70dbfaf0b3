"""Runs one stage in a thread and collects its messages."""

import queue
import threading
from contextlib import contextmanager

from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    OmniRequest,
    Result,
    ResultChunk,
    Shutdown,
    StageFailure,
    StagePayload,
    StreamChunk,
    Submit,
)

PATIENCE_SECS = 60


class Inbox:
    """A queue that can wait until its reader has taken every message and waits for more."""

    def __init__(self) -> None:
        self._held = queue.SimpleQueue()
        self._change = threading.Condition()
        self._puts = self._gets = 0

    def put(self, message) -> None:
        with self._change:
            self._puts += 1
        self._held.put(message)

    def get(self):
        with self._change:
            self._gets += 1
            self._change.notify_all()
        return self._held.get()

    def wait_until_taken(self) -> None:
        with self._change:
            assert self._change.wait_for(lambda: self._gets > self._puts, PATIENCE_SECS)


class Stage:
    """The inbox of a running stage, and the messages that it emits, without gauges."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self._messages = queue.SimpleQueue()

    def receive(self, message) -> None:
        if isinstance(message, Result | StageFailure | ResultChunk):
            self._messages.put(message)

    def next(self):
        return self._messages.get(timeout=PATIENCE_SECS)

    def submit(self, request_id, inputs, *, fed=False, params=None, **metadata):
        request = OmniRequest(inputs, params or {}, metadata)
        payload = StagePayload(request_id, request, {"raw_inputs": inputs})
        self.inbox.put(Submit(payload, "decode" if fed else "", fed))

    def stream_open(self, request_id, *texts):
        """Streams texts into the stage. More will follow."""
        for text in texts:
            self.inbox.put(StreamChunk(request_id, "decode", {"text": text}))

    def stream(self, request_id, *texts):
        """Streams texts into the stage, and marks the last of them as the end of the stream."""
        self.stream_open(request_id, *texts[:-1])
        self.inbox.put(StreamChunk(request_id, "decode", {"text": texts[-1]}, last=True))

    def settle(self):
        """Returns when the stage has taken all messages from its inbox."""
        self.inbox.wait_until_taken()

    def abort(self, request_id):
        self.inbox.put(Abort(request_id))

    def ask(self, inputs, *texts, **options):
        """Returns the chunks and the last message of a request. It must be the only one."""
        self.submit("r", inputs, fed=bool(texts), **options)
        if texts:
            self.stream("r", *texts)
        chunks = []
        while isinstance(message := self.next(), ResultChunk):
            assert message.request_id == "r"
            assert message.chunk_id == len(chunks)
            chunks.append(message.chunk)
        return chunks, message

    def fault(self, inputs, *texts, **options):
        _, end = self.ask(inputs, *texts, **options)
        assert isinstance(end, StageFailure)
        return end.kind, end.error


@contextmanager
def running(scheduler):
    stage = Stage()
    thread = threading.Thread(target=scheduler.run, args=(stage.inbox, stage.receive))
    thread.start()
    try:
        yield stage
    finally:
        stage.inbox.put(Shutdown())
        thread.join(PATIENCE_SECS)
        assert not thread.is_alive()
