"""Factories of real stages for tests. Child processes import them, too."""

import os
import threading

import trio

from omni_proxy.replica.pipeline.config import PipelineConfig, StageConfig
from omni_proxy.replica.pipeline.stage import CallerError, FunctionScheduler
from omni_proxy.replica.pipeline.stage_messages import Admin, AdminResult, Shutdown

HERE = "tests.replica.pipeline.pipeline_stages"


def text_of(payload):
    data = payload.data
    return data.get("text", data.get("raw_inputs")) if isinstance(data, dict) else data


def upper(stage_name, suffix=""):
    """Returns its text in upper case, letter by letter if the request is streamed."""

    def work(payload, emit_chunk, _aborted):
        text = text_of(payload).upper() + suffix
        if payload.request.params.get("stream"):
            for letter in text[:-1]:
                emit_chunk({"text": letter})
        return {"text": text, "pid": os.getpid(), "thread": threading.current_thread().name}

    return FunctionScheduler(stage_name, work)


def speaker(stage_name):
    """Four bytes of audio for each letter of its input or stream."""

    class Speech:
        def __init__(self, emit_chunk):
            self.emit_chunk = emit_chunk
            self.audio = b""

        def feed(self, chunk):
            audio = b"".join(letter.encode().ljust(4, b".") for letter in chunk.get("text", ""))
            self.audio += audio
            if audio:
                self.emit_chunk({"audio_data": audio, "sample_rate": 8000})

        def finish(self):
            return {"audio_data": self.audio, "sample_rate": 8000}

    def speak(payload, emit_chunk, _aborted):
        speech = Speech(emit_chunk)
        speech.feed({"text": text_of(payload)})
        return speech.finish()

    return FunctionScheduler(
        stage_name, speak, open_feed=lambda payload, emit_chunk, aborted: Speech(emit_chunk)
    )


def failing(stage_name, caller=False):
    def fail(payload, _emit_chunk, _aborted):
        raise CallerError("your fault") if caller else RuntimeError("our fault")

    return FunctionScheduler(stage_name, fail)


def until_aborted(stage_name, folder=""):
    """Emits one chunk, then runs until it is aborted. Records the abort in a file of `folder`."""

    def work(payload, emit_chunk, aborted):
        emit_chunk({"text": "begun"})
        pause = threading.Event()
        while not aborted():
            pause.wait(0.002)
        if folder:
            with open(f"{folder}/{payload.request_id}", "a") as file:
                file.write("aborted\n")
        return {"text": "never"}

    return FunctionScheduler(stage_name, work, concurrency=4)


def unsendable(stage_name):
    return FunctionScheduler(stage_name, lambda payload, emit_chunk, aborted: {"text": object()})


def environment(stage_name, name):
    return FunctionScheduler(
        stage_name, lambda payload, emit_chunk, aborted: {"text": os.environ.get(name, "")}
    )


def unstartable(stage_name):
    raise ValueError("no such weights")


def missing_dependency(stage_name):
    import surely_not_installed  # noqa: F401


class OperationResponder:
    """Answers each operation as `answers` says, and never answers one that is not in it."""

    supports_admin = True

    def __init__(self, stage_name, answers):
        self.stage, self.answers = stage_name, answers
        self.info = {"answers": sorted(answers)}

    def run(self, inbox, emit):
        while not isinstance(message := inbox.get(), Shutdown):
            if isinstance(message, Admin) and message.action in self.answers:
                emit(
                    AdminResult(
                        message.op_id,
                        self.stage,
                        message.action,
                        self.answers[message.action],
                        "done",
                        {"got": message.payload, "timeout_s": message.timeout_s},
                        error=None if self.answers[message.action] else f"{self.stage} refused",
                        rank=0,
                    )
                )


def answering_operations(stage_name, answers):
    return OperationResponder(stage_name, answers)


class Broken:
    supports_admin = False

    def run(self, inbox, emit):
        inbox.get()
        raise MemoryError("no room")


def broken(stage_name):
    return Broken()


def join_texts(data):
    return {"text": " and ".join(data[name]["text"] for name in sorted(data))}


def speak_if_audio_is_wanted(payload):
    return ["s"] if "audio" in payload.request.metadata["output_modalities"] else []


def route_to_an_unknown_stage(payload):
    return ["nowhere"]


def failing_route(payload):
    raise KeyError("route")


def stage(name, factory="upper", **keys):
    return StageConfig(name=name, factory=f"{HERE}:{factory}", **keys)


def pipeline(*stages, **keys):
    return PipelineConfig(name="test", stages=stages, **keys)


def route_nowhere(payload):
    return []


async def until(condition):
    """Polls, since the progress of another thread or process cannot be awaited."""
    while True:
        if condition():
            return
        await trio.sleep(0.005)
