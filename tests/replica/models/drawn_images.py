"""Images with words in them, as files."""

import importlib.util
from io import BytesIO

import pytest

needs_reader = pytest.mark.skipif(
    importlib.util.find_spec("rapidocr_onnxruntime") is None,
    reason="rapidocr is not installed: pip install 'omni-proxy[ocr]'",
)


def file_of(image, form="PNG", **how):
    held = BytesIO()
    image.save(held, form, **how)
    return held.getvalue()


def drawn(*lines, paper="white", ink="black", mode="RGB"):
    """Return an image with one line below the other."""
    pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'omni-proxy[ocr]'")
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new(mode, (560, 80 * len(lines) + 20), paper)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(40)
    for row, line in enumerate(lines):
        pen.text((20, 20 + 80 * row), line, fill=ink, font=font)
    return image
