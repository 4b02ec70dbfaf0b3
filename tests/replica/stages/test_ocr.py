import pytest

from omni_proxy.replica.pipeline.messages import OmniRequest, Result, StagePayload
from omni_proxy.replica.pipeline.stage import FunctionScheduler
from omni_proxy.replica.stages import ocr
from omni_proxy.replica.stages.ocr import ImageError, OcrStage
from tests.replica.models.drawn_images import drawn, file_of, needs_reader
from tests.replica.stages.stage_harness import running


class Letters:
    """Reads files that are plain text."""

    def read(self, image_bytes):
        if b"\0" in image_bytes:
            raise ImageError("the image is damaged")
        return [(line, 1.0) for line in image_bytes.decode().splitlines()]


@pytest.fixture
def stage():
    with running(FunctionScheduler("look", OcrStage(Letters()))) as stage:
        yield stage


def test_every_image_has_a_reading_in_their_order(stage):
    inputs = {"messages": [], "images": [b"a\nb", b"", b"c"]}
    _, end = stage.ask(inputs)
    assert isinstance(end, Result)
    assert end.data == {"raw_inputs": inputs, "readings": ["a\nb", "", "c"]}


@pytest.mark.parametrize("inputs", ["hi", {"messages": []}, {"images": []}])
def test_a_request_without_images_continues_without_readings(stage, inputs):
    _, end = stage.ask(inputs)
    assert end.data == {"raw_inputs": inputs, "readings": []}


def test_earlier_transcripts_are_kept():
    inputs = {"messages": [], "images": [b"a"]}
    payload = StagePayload("r", OmniRequest(None), {"raw_inputs": inputs, "transcripts": ["said"]})
    assert OcrStage(Letters())(payload, print, lambda: False) == {
        "raw_inputs": inputs,
        "transcripts": ["said"],
        "readings": ["a"],
    }


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([b"a", b"\0"], "images[1]: the image is damaged"),
        (["a"], "images[0]: an image is the bytes of its file"),
    ],
)
def test_an_image_that_cannot_be_read_is_the_callers_fault(stage, images, reason):
    assert stage.fault({"images": images}) == ("caller", reason)


def test_after_an_abort_no_image_is_looked_at():
    seen = []

    class Counting(Letters):
        def read(self, image_bytes):
            seen.append(image_bytes)
            return super().read(image_bytes)

    payload = StagePayload("r", OmniRequest({"images": [b"a"] * 3}), None)
    OcrStage(Counting())(payload, print, lambda: len(seen) == 2)
    assert seen == [b"a", b"a"]


@needs_reader
def test_the_stage_reads_what_is_drawn():
    with running(ocr.build("look", threads=1)) as stage:
        _, end = stage.ask({"images": [file_of(drawn("Invoice 4711", "Pay soon"))]})
        (reading,) = end.data["readings"]
        assert [line.replace(" ", "") for line in reading.split("\n")] == ["Invoice4711", "Paysoon"]
        kind, reason = stage.fault({"images": [b"no image"]})
        assert (kind, reason[:19]) == ("caller", "images[0]: this is ")
