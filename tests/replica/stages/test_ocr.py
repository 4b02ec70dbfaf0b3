import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.pipeline.stage import FunctionScheduler
from omni_proxy.replica.pipeline.stage_messages import OmniRequest, Result, StagePayload
from omni_proxy.replica.stages import ocr
from omni_proxy.replica.stages.ocr import (
    FORMATS,
    MAX_SIDE,
    MAX_SIDE_RATIO,
    MIN_SIDE,
    ImageError,
    MissingOcrError,
    OcrReader,
    OcrStage,
    decode_image,
    join_lines,
    pad_to_detector,
)
from tests.replica.models.drawn_images import drawn, file_of, needs_reader
from tests.replica.stages.stage_harness import running

INVOICE = ("Invoice 4711", "Total: 42.50 EUR")


class PlainTextReader:
    """Reads files that are plain text."""

    def read(self, image_bytes):
        if b"\0" in image_bytes:
            raise ImageError("the image is damaged")
        return [(line, 1.0) for line in image_bytes.decode().splitlines()]


@pytest.fixture
def stage():
    with running(FunctionScheduler("look", OcrStage(PlainTextReader()))) as stage:
        yield stage


def test_every_image_has_a_reading_in_order(stage):
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
    assert OcrStage(PlainTextReader())(payload, print, lambda: False) == {
        "raw_inputs": inputs,
        "transcripts": ["said"],
        "readings": ["a"],
    }


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([b"a", b"\0"], "images[1]: the image is damaged"),
        (["a"], "images[0]: an image must be the bytes of its file"),
    ],
)
def test_an_image_that_cannot_be_read_is_an_error_of_the_caller(stage, images, reason):
    assert stage.fault({"images": images}) == ("caller", reason)


def test_no_image_is_read_after_an_abort():
    read_images = []

    class Counting(PlainTextReader):
        def read(self, image_bytes):
            read_images.append(image_bytes)
            return super().read(image_bytes)

    payload = StagePayload("r", OmniRequest({"images": [b"a"] * 3}), None)
    OcrStage(Counting())(payload, print, lambda: len(read_images) == 2)
    assert read_images == [b"a", b"a"]


@needs_reader
def test_the_stage_reads_the_text_of_an_image():
    with running(ocr.build("look", threads=1)) as stage:
        _, end = stage.ask({"images": [file_of(drawn("Invoice 4711", "Pay soon"))]})
        (reading,) = end.data["readings"]
        assert [line.replace(" ", "") for line in reading.split("\n")] == ["Invoice4711", "Paysoon"]
        kind, reason = stage.fault({"images": [b"no image"]})
        assert (kind, reason[:19]) == ("caller", "images[0]: this is ")


def piece(text, left, top, *, height=20.0, confidence=0.9):
    right, bottom = left + 50, top + height
    return [[left, top], [right, top], [right, bottom], [left, bottom]], text, confidence


def blank(width, height):
    image = pytest.importorskip("PIL.Image")
    return image.new("RGB", (width, height), "white")


def test_words_at_one_height_form_a_line_and_lines_are_in_order():
    pieces = [
        piece("42.50", 300, 103, confidence=0.7),
        piece("Invoice", 10, 10),
        piece("Total", 10, 97),
        piece("4711", 200, 15, confidence=0.8),
    ]
    assert join_lines(pieces) == [("Invoice 4711", 0.8), ("Total 42.50", 0.7)]
    assert join_lines([]) == []


@given(st.permutations([(row, column) for row in range(4) for column in range(3)]))
def test_the_order_in_which_pieces_are_found_does_not_matter(cells):
    pieces = [piece(f"{row}{column}", column * 60, row * 25) for row, column in cells]
    assert [text for text, _ in join_lines(pieces)] == [
        " ".join(f"{row}{column}" for column in range(3)) for row in range(4)
    ]


@pytest.mark.parametrize("format_", FORMATS)
def test_images_of_every_format_are_decoded(format_):
    image = decode_image(file_of(drawn("Hi"), format_))
    assert (image.mode, image.size) == ("RGB", (560, 100))
    assert min(image.convert("L").get_flattened_data()) < 50


def test_transparent_pixels_become_white():
    image = decode_image(file_of(drawn("Hi", mode="RGBA", paper=(0, 0, 0, 0))))
    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_the_exif_rotation_of_a_photograph_is_applied():
    image = drawn("Hi").rotate(90, expand=True)
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was rotated to the right
    assert decode_image(file_of(image, "JPEG", exif=exif)).size == (560, 100)


def test_the_first_frame_of_an_animation_is_used():
    frames = [blank(10, 10), drawn("Hi", paper="black").resize((10, 10))]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(data).getpixel((5, 5)) == (255, 255, 255)


def test_a_large_image_is_scaled_down():
    assert decode_image(file_of(blank(3000, 1500))).size == (MAX_SIDE, MAX_SIDE // 2)


@pytest.mark.parametrize("size", [(1, 1), (2000, 1), (1, 2000), (2000, 249), (500, 160)])
def test_the_detector_gets_only_images_of_a_supported_size(size):
    width, height = pad_to_detector(blank(*size)).size
    assert min(width, height) >= MIN_SIDE
    assert max(width, height) <= MAX_SIDE_RATIO * min(width, height)
    assert (width, height) >= size


def test_an_image_with_too_many_pixels_is_refused_before_decoding(monkeypatch):
    data = file_of(blank(100, 100))
    monkeypatch.setattr(ocr, "MAX_PIXELS", 9_999)
    with pytest.raises(ImageError, match=r"100 x 100 pixels; at most 9999"):
        decode_image(data)


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000)])
def test_a_file_that_claims_to_be_huge_is_refused(size):
    data = file_of(blank(1, 1), "GIF")
    claimed = b"".join(side.to_bytes(2, "little") for side in size)
    with pytest.raises(ImageError, match="pixels"):
        decode_image(data[:6] + claimed + data[10:])


@pytest.mark.parametrize("data", [b"", b"no image", b"<svg/>", b"BM" + b"\0" * 60])
def test_data_that_is_not_an_image_is_refused_with_the_supported_formats(data):
    pytest.importorskip("PIL")
    with pytest.raises(ImageError, match="no image in a supported format: PNG, JPEG, WEBP, GIF"):
        decode_image(data)


def test_a_damaged_image_is_decoded_or_refused():
    rng = random.Random(1)
    files = [file_of(drawn("Hi"), format_) for format_ in FORMATS]
    refused = 0
    for _ in range(400):
        data = bytearray(rng.choice(files))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(min(len(data), 200))] = rng.randrange(256)
        try:
            decode_image(bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data))
        except ImageError:
            refused += 1
    assert 100 < refused < 400


def test_the_error_about_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    with pytest.raises(MissingOcrError, match=r"pip install 'omni-proxy\[ocr\]'.*headless"):
        OcrReader()


@pytest.fixture(scope="module")
def reader():
    return OcrReader()


def read(reader, image):
    lines = reader.read(file_of(image))
    assert all(0.8 < confidence <= 1 for _, confidence in lines)
    # The recognizer sometimes drops a space.
    return [text.replace(" ", "") for text, _ in lines]


@needs_reader
@pytest.mark.parametrize(("paper", "ink"), [("white", "black"), ("black", "white")])
def test_drawn_text_is_read(reader, paper, ink):
    image = drawn(*INVOICE, paper=paper, ink=ink)
    assert read(reader, image) == ["Invoice4711", "Total:42.50EUR"]


@needs_reader
@pytest.mark.parametrize("size", [(1, 1), (2500, 5)])
def test_an_image_without_text_has_no_lines(reader, size):
    assert read(reader, blank(*size)) == []
