"""Images of text, and their encoded files."""

import importlib.util
from io import BytesIO

import pytest

needs_reader = pytest.mark.skipif(
    importlib.util.find_spec("rapidocr_onnxruntime") is None,
    reason="rapidocr is not installed: pip install 'omni-proxy[ocr]'",
)


def file_of(image, image_format="PNG", **options):
    buffer = BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def drawn(*lines, paper="white", ink="black", mode="RGB"):
    """An image of the lines of text, one below the other."""
    pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'omni-proxy[ocr]'")
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new(mode, (560, 80 * len(lines) + 20), paper)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(40)
    for row, line in enumerate(lines):
        draw.text((20, 20 + 80 * row), line, fill=ink, font=font)
    return image
