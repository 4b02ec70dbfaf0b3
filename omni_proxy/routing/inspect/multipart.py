"""The two plain fields of a multipart form that routing may use: `model` and `stream`.

A scan, no parser: any malformation means "no facts", never an error, for the worker is the judge of
its form. Bounded: values to 4 KiB, part heads to 8 KiB, the first 2000 parts. Source:
omni-router.md 7.
"""

from __future__ import annotations

import re

MAX_VALUE_BYTES = 4096
MAX_PART_HEAD_BYTES = 8192
MAX_PARTS = 2000  # servers commonly refuse more; to look at each of millions would take seconds
WANTED = ("model", "stream")
_BOUNDARY = re.compile(rb'boundary="?([^";,\r\n]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="?([^";\r\n]+)"?', re.IGNORECASE)


def form_fields(body: bytes, content_type: bytes) -> dict[str, str]:
    """The wanted fields that are there; the first of each wins."""
    if not content_type.lower().startswith(b"multipart/form-data"):
        return {}
    found = _BOUNDARY.search(content_type)
    if not found:
        return {}
    mark = b"--" + found[1].strip()
    fields: dict[str, str] = {}
    at = body.find(mark)
    for _ in range(MAX_PARTS):
        if at < 0 or len(fields) == len(WANTED):
            break
        start = at + len(mark)
        if body[start : start + 2] != b"\r\n":
            break
        at = body.find(b"\r\n" + mark, start)
        head_end = body.find(b"\r\n\r\n", start, start + MAX_PART_HEAD_BYTES)
        if at < 0 or head_end < 0:
            break
        name = _plain_name(body[start:head_end])
        if name in WANTED and name not in fields and at - head_end - 4 <= MAX_VALUE_BYTES:
            fields[name] = body[head_end + 4 : at].decode("utf-8", "replace")
        at += 2
    return fields


def _plain_name(head: bytes) -> str:
    """The name of a part that is no file."""
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-disposition:") and b"filename" not in line.lower():
            found = _NAME.search(line)
            if found:
                return found[1].decode("utf-8", "replace")
    return ""
