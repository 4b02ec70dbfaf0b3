"""The image stage ("look"): images in, the text in them out, by OCR.

OCR is RapidOCR (PP-OCRv4 on onnxruntime), from the extra `ocr`, whose packages are imported lazily.
Invariant: one reading for each image, in the order of the images; that of an image without text is
empty. Outputs of earlier stages are passed on. No image of more than MAX_PIXELS is decoded, and the
detector's input is bounded in its sides and in their ratio, since its memory grows with both.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from omni_proxy.replica.pipeline.stage import (
    Aborted,
    CallerError,
    EmitChunk,
    FunctionScheduler,
)
from omni_proxy.replica.pipeline.stage_messages import StagePayload

if TYPE_CHECKING:
    from PIL import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS: Final = 40_000_000
MAX_SIDE: Final = 2000  # in pixels; the detector scales larger images down
MAX_SIDE_RATIO: Final = 8  # of the sides; the detector brings the short one to at least 736 pixels
MIN_SIDE: Final = 32
MISSING = (
    "images cannot be read: {}; pip install 'omni-proxy[ocr]', and on a machine without libGL "
    "replace opencv-python with opencv-python-headless"
)

# Exceptions that Pillow raises for damaged files of these formats.
_DAMAGED = (OSError, SyntaxError, EOFError, LookupError, TypeError, ValueError, struct.error)

Line: TypeAlias = tuple[str, float]
# A result of RapidOCR: the four corners (x, y), the text, its confidence.
OcrDetection: TypeAlias = tuple[Sequence[Sequence[float]], str, float]


class ImageError(ValueError):
    """The image cannot be read; the message has the reason and the supported formats."""


class MissingOcrError(Exception):
    """The OCR packages cannot be imported; the message says how to install them."""


class OcrReader:
    """One loaded OCR model. Not thread-safe."""

    def __init__(self, threads: int = 1) -> None:
        """Load the models of the package. Raises MissingOcrError."""
        try:
            from rapidocr_onnxruntime import RapidOCR
        except ImportError as error:
            raise MissingOcrError(MISSING.format(error)) from error
        self._recognise: Any = RapidOCR(intra_op_num_threads=threads, inter_op_num_threads=1)

    def read(self, image_bytes: bytes) -> list[Line]:
        """Return the lines from top to bottom, each with its confidence (0 to 1).

        Only the first frame of an animation is read. Raises ImageError.
        """
        detections, _ = self._recognise(pad_to_detector(decode_image(image_bytes)))
        return join_lines(detections or [])


def decode_image(image_bytes: bytes) -> Image.Image:
    """Return the image upright, in RGB, with sides of at most MAX_SIDE. Raises ImageError."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(BytesIO(image_bytes), formats=FORMATS) as file:
            if file.width * file.height > MAX_PIXELS:
                raise ImageError(
                    f"the image has {file.width} x {file.height} pixels; the limit is {MAX_PIXELS}"
                )
            file.draft("RGB", (MAX_SIDE, MAX_SIDE))
            image = _on_white(ImageOps.exif_transpose(file))
    except UnidentifiedImageError:
        raise ImageError(f"not an image in a supported format: {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"the image is too large: {error}") from None
    except ImageError:
        raise
    except _DAMAGED as error:
        raise ImageError(f"the image is damaged: {error}") from None
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image


def _on_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    paper = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(paper, layer).convert("RGB")


def pad_to_detector(image: Image.Image) -> Image.Image:
    """Return the image on a white background with sides that the detector accepts."""
    from PIL import Image

    least = max(MIN_SIDE, -(-max(image.size) // MAX_SIDE_RATIO))
    if min(image.size) >= least:
        return image
    paper = Image.new("RGB", (max(image.width, least), max(image.height, least)), "white")
    paper.paste(image, (0, 0))
    return paper


def join_lines(detections: Sequence[OcrDetection]) -> list[Line]:
    """Join words side by side into lines; a line's confidence is the lowest of its words.

    A word belongs to a line if its middle is between the upper and lower edge of the line's first
    word.
    """
    lines: list[list[_Word]] = []
    for word in sorted(map(_Word, detections), key=lambda word: word.middle):
        if lines and lines[-1][0].top <= word.middle <= lines[-1][0].bottom:
            lines[-1].append(word)
        else:
            lines.append([word])
    return [_line(sorted(words, key=lambda word: word.left)) for words in lines]


def _line(words: Sequence[_Word]) -> Line:
    return " ".join(word.text for word in words), min(word.confidence for word in words)


class _Word:
    """Recognized text with its position."""

    __slots__ = ("bottom", "confidence", "left", "middle", "text", "top")

    def __init__(self, detection: OcrDetection) -> None:
        corners, text, confidence = detection
        heights = [corner[1] for corner in corners]
        self.top, self.bottom = min(heights), max(heights)
        self.middle = (self.top + self.bottom) / 2
        self.left = min(corner[0] for corner in corners)
        self.text, self.confidence = text.strip(), float(confidence)


class ImageReader(Protocol):
    """The interface of an OCR model, which OcrReader implements."""

    def read(self, image_bytes: bytes) -> list[Line]: ...


def build(stage_name: str, *, threads: int = 1) -> FunctionScheduler:
    """Load the OCR model and return the stage. Raises MissingOcrError."""
    return FunctionScheduler(stage_name, OcrStage(OcrReader(threads)), marks="encoder")


class OcrStage:
    """The stage's function over one loaded OCR model."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader

    def __call__(
        self, payload: StagePayload, emit_chunk: EmitChunk, aborted: Aborted
    ) -> dict[str, Any]:
        """Return `{"raw_inputs": ..., "readings": [text of each image]}`; raises CallerError."""
        data = payload.data if isinstance(payload.data, Mapping) else {}
        inputs = data.get("raw_inputs", payload.request.inputs)
        images = inputs.get("images") if isinstance(inputs, Mapping) else None
        readings: list[str] = []
        for index, image in enumerate(images or ()):
            if aborted():
                break
            readings.append(self._reading(image, f"images[{index}]"))
        return {**data, "raw_inputs": inputs, "readings": readings}

    def _reading(self, image: Any, path: str) -> str:
        if not isinstance(image, bytes):
            raise CallerError(f"{path}: an image must be the bytes of its file")
        try:
            return "\n".join(text for text, _ in self._reader.read(image))
        except ImageError as error:
            raise CallerError(f"{path}: {error}") from error
