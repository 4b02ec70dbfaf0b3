"""The image stage ("look"): images in, the text in them out, by OCR.

Invariant: one reading for each image, in the order of the images; an image without text has an
empty one. Outputs of earlier stages are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from omni_proxy.replica.models.ocr import ImageError, Line, OcrReader
from omni_proxy.replica.pipeline.messages import StagePayload
from omni_proxy.replica.pipeline.stage import (
    Aborted,
    CallerError,
    EmitChunk,
    FunctionScheduler,
)


class ImageReader(Protocol):
    """What this stage needs of a model; OcrReader has it."""

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
            raise CallerError(f"{path}: an image is the bytes of its file")
        try:
            return "\n".join(text for text, _ in self._reader.read(image))
        except ImageError as error:
            raise CallerError(f"{path}: {error}") from error
