"""A template learned from one sample head.

Varying values are replaced by unique marks and the parser reads the result: where the marks are
then is where values go, so equal values in two fields can't mislead. Pure. Invariant: what the
parser did with a mark is all that is ever done with a value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from hashlib import blake2b
from typing import Final

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.head_caching.template import (
    CONTROLS,
    CONTROLS_AND_SPACES,
    COUNT,
    HeadTemplate,
    Step,
)
from omni_proxy.wire.request import RequestHead

CRLF: Final = b"\r\n"
LENGTH_NAME: Final = b"content-length"


def learn_template(
    sample: bytes,
    varying: Collection[int],
    ids: Collection[bytes],
    judge: Callable[[bytes], RequestHead],
) -> tuple[RequestHead, HeadTemplate] | None:
    """What `parse` says of heads like the whole head `sample`, and how they are written.

    `varying` are the numbers of its lines whose values vary, `ids` the lower-case names of fields
    of which one may be the request's id. None where it does not pass the values on as they are.
    """
    lines = sample[:-4].split(CRLF)
    stem = blake2b(sample, digest_size=16).hexdigest()  # which no head holds of itself
    marks = {
        at: b"%b-%d." % (stem.encode(), at)
        for at in sorted(varying)
        if name_of(lines[at]) != LENGTH_NAME
    }
    marked = [
        _beginning(line) + marks[at] if at in marks else line for at, line in enumerate(lines)
    ]
    try:
        head = judge(CRLF.join((*marked, b"", b"")))
    except HttpError:
        return None
    behind = _behind(head.lines, marks)
    if head.lines.count(stem.encode()) != len(behind) or not _only_in_lines(head, stem):
        return None  # one stands twice, or elsewhere than it came
    id_of = next((at for at, mark in marks.items() if mark == head.request_id), None)
    if id_of not in behind and stem.encode() in head.request_id:
        return None
    template = HeadTemplate(
        head.lines.partition(stem.encode())[0],
        *_steps(lines, sorted(varying), behind, ids),
        counted=len(marks) < len(varying),
        id_index=2 * list(behind).index(id_of) + 1 if id_of in behind else -1,
    )
    head.lines = b""
    return head, template


def _steps(
    lines: list[bytes], varying: list[int], behind: dict[int, bytes], ids: Collection[bytes]
) -> tuple[tuple[Step, ...], bytes]:
    """`steps` and `last` of a HeadTemplate."""
    steps: list[Step] = []
    done = 0
    for at in varying:
        before = b"".join(line + CRLF for line in lines[done:at])
        beginning = _beginning(lines[at])
        name = name_of(beginning)
        forbidden = CONTROLS_AND_SPACES if name in ids else CONTROLS
        if name == LENGTH_NAME:
            forbidden = COUNT
        same = before + beginning
        steps.append((same, len(same), forbidden, behind.get(at)))
        done = at + 1
    return tuple(steps), CRLF.join(lines[done:])


def name_of(field: bytes) -> bytes:
    """Of one field line, in lower case."""
    return field.partition(b":")[0].lower()


def _beginning(field: bytes) -> bytes:
    """Of one field line, what stands before its value."""
    name, _, value = field.partition(b":")
    return name + b": " if value[:1] == b" " else name + b":"


def _only_in_lines(head: RequestHead, stem: str) -> bool:
    """Whether nothing else that is known of it comes of a mark, its id aside."""
    others = [
        getattr(head, name)
        for name in RequestHead.__struct_fields__
        if name not in ("lines", "request_id", "spelling")
    ]
    return stem not in repr(others)


def _behind(lines: bytes, marks: dict[int, bytes]) -> dict[int, bytes]:
    """Of each mark that is there, in their order, what follows it until the next."""
    found: dict[int, bytes] = {}
    rest, last = lines, None
    for at, mark in marks.items():
        before, is_there, behind = rest.partition(mark)
        if is_there:
            if last is not None:
                found[last] = before
            found[at] = rest = behind
            last = at
    return found
