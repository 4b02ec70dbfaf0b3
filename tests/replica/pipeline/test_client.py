import pytest
import trio

from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.config import compile_plan
from omni_proxy.replica.pipeline.coordination.coordinator import Coordinator
from omni_proxy.replica.pipeline.requests import (
    GenerateRequest,
    QueueFullError,
    RequestAborted,
    RequestFailed,
)
from omni_proxy.replica.pipeline.runtime import open_pipeline
from omni_proxy.replica.pipeline.stage_messages import Abort, Result, ResultChunk, Submit
from tests.replica.pipeline.pipeline_stages import HERE, pipeline, stage

HI = GenerateRequest("hi", stream=True)


class FakeTransport:
    """Answers each request with `pieces` chunks, and with a result if `ends`."""

    def __init__(self, pieces=2, ends=True):
        self.pieces, self.ends = pieces, ends
        self.aborts = []
        self.hub = Coordinator(compile_plan(pipeline(stage("a", terminal=True))), self)
        self.client = Client(self.hub)

    def send(self, stage_name, message):
        if isinstance(message, Abort):
            self.aborts.append(message.request_id)
        if isinstance(message, Submit):
            request_id = message.payload.request_id
            token = trio.lowlevel.current_trio_token()
            for number in range(self.pieces):
                piece = ResultChunk(request_id, "a", {"text": str(number)}, number)
                token.run_sync_soon(self.hub.receive, piece)
            if self.ends:
                whole = {"text": "".join(map(str, range(self.pieces))) + "!"}
                token.run_sync_soon(self.hub.receive, Result(request_id, "a", whole))


async def test_a_generation_that_ends_normally_is_not_aborted():
    transport = FakeTransport()
    async with transport.client.generate(HI, "r") as generation:
        texts = [chunk.text async for chunk in generation]
    assert texts == ["0", "1", "!"]
    assert [chunk async for chunk in generation] == []
    assert transport.aborts == []
    assert transport.client.health()["total_requests"] == 0


async def test_leaving_a_generation_early_aborts_it_once():
    transport = FakeTransport(ends=False)
    async with transport.client.generate(HI, "r") as generation:
        async for chunk in generation:
            assert chunk.text == "0"
            break
        await generation.aclose()
    await generation.aclose()
    assert transport.aborts == ["r"]
    assert transport.client.health()["total_requests"] == 0


async def test_leaving_a_loop_without_a_context_manager_aborts():
    transport = FakeTransport(ends=False)
    async for _ in transport.client.generate(HI, "r"):
        break
    assert transport.aborts == ["r"]


async def test_a_generation_that_is_never_entered_submits_nothing():
    transport = FakeTransport()
    transport.client.generate(HI, "r")
    assert transport.client.health()["total_requests"] == 0
    assert transport.aborts == []


async def test_a_completion_cancelled_while_waiting_is_aborted(autojump_clock):
    transport = FakeTransport(pieces=0, ends=False)
    with trio.move_on_after(1) as scope:
        await transport.client.completion(HI, "r")
    assert scope.cancelled_caught
    assert transport.aborts == ["r"]


async def test_a_generation_cancelled_while_it_is_entered_leaves_no_request():
    transport = FakeTransport(ends=False)
    generation = transport.client.generate(HI, "r")
    with trio.CancelScope() as scope:
        scope.cancel()
        async with generation:
            raise AssertionError("entered")
    assert scope.cancelled_caught
    assert transport.client.health()["total_requests"] == 0


async def test_an_error_in_the_code_of_the_reader_aborts():
    transport = FakeTransport(ends=False)
    with pytest.raises(ZeroDivisionError):
        async with transport.client.generate(HI, "r"):
            _ = 1 / 0
    assert transport.aborts == ["r"]


async def test_an_abort_ends_the_reader_after_its_waiting_chunks():
    transport = FakeTransport(pieces=1, ends=False)
    async with transport.client.generate(HI, "r") as generation:
        assert (await anext(generation)).text == "0"
        assert await transport.client.abort("r")
        assert not await transport.client.abort("r")
        with pytest.raises(RequestAborted, match="aborted"):
            await anext(generation)
    assert transport.aborts == ["r"]


async def test_entering_a_generation_submits_it_and_reports_a_full_queue():
    transport = FakeTransport()
    transport.hub = Coordinator(
        compile_plan(pipeline(stage("a", terminal=True), max_in_flight=1)), transport
    )
    client = Client(transport.hub)
    async with client.generate(HI, "one"):
        with pytest.raises(QueueFullError):
            async with client.generate(HI, "two"):
                raise AssertionError("entered")
        with pytest.raises(RequestFailed, match="Request one already exists"):
            await client.completion(HI, "one")
    assert transport.aborts == ["one"]


async def test_a_closed_generation_cannot_be_entered_again():
    transport = FakeTransport()
    generation = transport.client.generate(HI, "r")
    await generation.aclose()
    with pytest.raises(RequestFailed, match="closed"):
        async with generation:
            pass


async def test_concurrent_completions_each_get_their_own_result():
    config = pipeline(
        stage("a", next=("b",), params={"suffix": "-"}), stage("b", terminal=True, process="p")
    )
    with trio.fail_after(30):
        async with open_pipeline(config) as (hub, runtime):
            await runtime.ready.wait()
            client = Client(hub)
            texts = {}
            async with trio.open_nursery() as nursery:

                async def ask(number):
                    request = GenerateRequest(f"text {number}", stream=bool(number % 2))
                    texts[number] = (await client.completion(request)).text

                for number in range(20):
                    nursery.start_soon(ask, number)
            assert texts == {number: f"TEXT {number}-" for number in range(20)}


async def test_text_and_audio_of_two_terminal_stages_are_merged():
    config = pipeline(
        stage(
            "d",
            terminal=True,
            next=("s",),
            stream_to=("s",),
            route=f"{HERE}:speak_if_audio_is_wanted",
        ),
        stage("s", "speaker", terminal=True),
    )
    with trio.fail_after(30):
        async with open_pipeline(config) as (hub, runtime):
            await runtime.ready.wait()
            client = Client(hub)
            for stream in (True, False):
                request = GenerateRequest("ab", stream=stream, output_modalities=("text", "audio"))
                result = await client.speech(request)
                assert (result.text, result.audio) == ("AB", b"A...B...")
                assert result.sample_rate == 8000
            with pytest.raises(RequestFailed, match="no audio"):
                await client.speech(GenerateRequest("ab"))
