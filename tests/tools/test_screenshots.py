import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tree import ROOT
from tools.screenshots.png import SIGNATURE, _chunk, _chunks, _lines, smaller

WIDTH = 5
MAX_BYTES = 200_000


def filtered(rows, kinds):
    """Filters lines as a PNG encoder does: the inverse of the code under test."""
    raw, above = b"", bytes(WIDTH * 3)
    for row, kind in zip(rows, kinds, strict=True):
        raw += bytes([kind])
        for at, value in enumerate(row):
            left, corner = (row[at - 3], above[at - 3]) if at >= 3 else (0, 0)
            up = above[at]
            near = left + up - corner
            paeth = min(
                (abs(near - byte), rank, byte) for rank, byte in enumerate((left, up, corner))
            )
            guess = (0, left, up, (left + up) // 2, paeth[2])[kind]
            raw += bytes([(value - guess) & 255])
        above = row
    return raw


def png(raw, height, colour=2):
    header = struct.pack(">IIBBBBB", WIDTH, height, 8, colour, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(*part) for part in parts)


@given(st.lists(st.tuples(st.binary(min_size=15, max_size=15), st.integers(0, 4)), min_size=1))
def test_a_smaller_picture_has_the_same_pixels(lines):
    rows, kinds = zip(*lines, strict=True)
    picture = png(filtered(rows, kinds), len(rows))
    packed = dict(_chunks(smaller(picture)))[b"IDAT"]
    assert list(_lines(zlib.decompress(packed), WIDTH)) == list(rows)
    assert len(smaller(picture)) <= len(picture)


def test_a_picture_that_is_not_rgb_is_refused():
    with pytest.raises(ValueError, match="RGB"):
        smaller(png(b"", 0, colour=6))


@pytest.mark.parametrize("name", ["dashboard-light", "dashboard-dark", "dashboard-phone"])
def test_the_pictures_of_the_documentation_are_small(name):
    picture = (ROOT / "docs" / "pictures" / f"{name}.png").read_bytes()
    assert picture.startswith(SIGNATURE)
    assert len(picture) < MAX_BYTES
