"""python -m tools.fuzz TARGET: coverage-guided fuzzing of the parsers of untrusted bytes.

A finding is an exception other than the parser's own, or a request that is parsed differently when
it arrives in pieces. Inputs that reach new code are kept in tests/wire/corpus, which the tests
parse completely; `tools/fuzz` keeps it small. Needs `atheris`, which no other tool needs.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

CORPUS: Final = Path(__file__).parent.parent / "tests/wire/corpus"
READERS: Final = str(Path(__file__).parent.parent / "omni_proxy")
BODY_LIMIT: Final = 1 << 16
Step: TypeAlias = tuple[str, int, int]


def read_head(data: bytes) -> None:
    """A head is parsed the same in any pieces, and again the same when it has been forwarded."""
    from omni_proxy.wire.errors import HttpError
    from omni_proxy.wire.forwarded import ForwardedHeaders
    from omni_proxy.wire.head_caching.request_heads import RequestHeadCache
    from omni_proxy.wire.request import find_head_end, parse_request_head

    cut = data[0] if data else 0
    raw = data[1:]
    try:
        end = find_head_end(raw[:cut]) or find_head_end(raw, min(cut, len(raw)))
        if not end:
            return
        head = parse_request_head(raw[:end])
    except HttpError:
        return
    framing = b"content-length: %d\r\n" % max(head.length, 0)
    again = parse_request_head(head.lines + b"host: worker\r\n" + framing + b"\r\n")
    _same(again.lines, head.lines)
    templates = RequestHeadCache()
    for _ in range(3):  # it is cached at the second time
        known = templates.parse(raw[:end])
        _same(known.lines, head.lines)
        _same((known.length, known.target), (head.length, head.target))
    stamped = RequestHeadCache(ForwardedHeaders("replace", b"x-request-id")).parse(raw[:end])
    parse_request_head(stamped.lines + b"host: worker\r\n\r\n")


def read_chunks(data: bytes) -> None:
    """The end of a chunked body doesn't depend on the pieces in which it arrives."""
    from omni_proxy.wire.chunked import ChunkedBody
    from omni_proxy.wire.errors import HttpError

    cut = data[0] if data else 0
    reported: list[object] = []
    for pieces in ([data[1:]], [data[1 : cut + 1], data[cut + 1 :]]):
        body = ChunkedBody(BODY_LIMIT)
        try:
            for piece in pieces:
                body.feed(piece)
        except HttpError as refusal:
            reported.append((refusal.status,))
        else:
            reported.append((b"".join(body.payload), body.rest, body.is_complete))
    _same(*reported)


def read_response(data: bytes) -> None:
    """A worker's response: bytes after its end are never forwarded as part of it."""
    from omni_proxy.wire.response import (
        Framing,
        UpstreamProtocolError,
        UpstreamResponse,
        find_response_head_end,
    )

    cut = data[0] if data else 0
    raw = data[1:]
    try:
        end = find_response_head_end(raw)
        if not end:
            return
        response = UpstreamResponse()
        response.read_head(raw[:end], to_head=False)
        rest = raw[end:]
        for piece in (rest[:cut], rest[cut:]):
            if piece and not response.is_complete:
                passed = response.feed(piece)
                _same(piece.startswith(passed), True)
        if response.framing is Framing.LENGTH and response.remaining < 0:
            _same(response.is_complete, True)
    except UpstreamProtocolError:
        return


def read_proxy_header(data: bytes) -> None:
    """The PROXY protocol: incomplete and complete headers give the same result."""
    from omni_proxy.wire.proxy_protocol import ProxyHeaderError, parse_proxy_header

    try:
        found = parse_proxy_header(data)
    except ProxyHeaderError:
        return
    if found is not None:
        _same(parse_proxy_header(data[: found.length]), found)
        _same(parse_proxy_header(data[: found.length - 1]), None)


def read_form(data: bytes) -> None:
    """The fields of a form: parsing never fails."""
    from omni_proxy.routing.inspect.body_fields import form_fields

    _same(set(form_fields(data, b"multipart/form-data; boundary=x")) <= {"model", "stream"}, True)


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "head": read_head,
    "chunks": read_chunks,
    "response": read_response,
    "proxy_header": read_proxy_header,
    "form": read_form,
}


class Finding(AssertionError):
    """The same bytes were parsed in two different ways."""


def _same(one: Any, other: Any) -> None:
    if one != other:
        raise Finding(f"{one!r} is not {other!r}")


def keep(target: str, found: Path) -> int:
    """Keep the inputs of a folder, smallest first, that reach a step that no kept input reaches.

    Returns their number.
    """
    kept = CORPUS / target
    kept.mkdir(parents=True, exist_ok=True)
    known: set[Step] = set()
    for file in kept.iterdir():
        known |= steps_of(target, file.read_bytes())
    count = 0
    for file in sorted(found.iterdir(), key=lambda file: (file.stat().st_size, file.name)):
        data = file.read_bytes()
        steps = steps_of(target, data)
        if not steps <= known:
            known |= steps
            count += 1
            (kept / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
    return count


def steps_of(target: str, data: bytes) -> set[Step]:
    """The steps from line to line that the parsers took."""
    steps: set[Step] = set()
    before: dict[int, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(READERS):
            return None
        if event in ("line", "return"):
            name, line = frame.f_code.co_filename, frame.f_lineno
            steps.add((name, before.get(id(frame), 0), line))
            before[id(frame)] = line
        elif event == "call":
            before.pop(id(frame), None)
        return trace

    sys.settrace(trace)
    try:
        TARGETS[target](data)
    finally:
        sys.settrace(None)
    return steps


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--secs", type=int, default=60, help="duration (default: 60)")
    parser.add_argument(
        "--into", type=Path, help="folder for new inputs (default: the kept corpus)"
    )
    parser.add_argument(
        "--keep", type=Path, help="keep the useful inputs of this folder, then exit"
    )
    asked = parser.parse_args(arguments)
    if asked.keep:
        print(f"{keep(asked.target, asked.keep)} new inputs are kept")
        return 0
    return fuzz(asked.target, asked.secs, asked.into or CORPUS / asked.target)


def fuzz(target: str, secs: int, into: Path) -> int:
    try:
        import atheris
    except ImportError:
        print("needs atheris: pip install atheris", file=sys.stderr)
        return 2
    into.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports():
        pass
    folders = dict.fromkeys((str(into), str(CORPUS / target)))
    options = [f"-max_total_time={secs}", "-max_len=4096", "-timeout=10", *folders]
    atheris.Setup(["tools/fuzz", *options], TARGETS[target])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
