"""A replica against a peer that is none, is slow, lies, or is lost: raw sockets play the peer."""

import socket
import threading
from contextlib import contextmanager, suppress

import msgspec
import pytest

from omni_proxy.replica.kv_transfer.request_fields import Fetch, Serve
from omni_proxy.replica.kv_transfer.tensors import identity, prompt_digest, weights_digest
from omni_proxy.replica.kv_transfer.wire import (
    HEADER,
    MAGIC,
    VERSION,
    FrameKind,
    Hello,
    Offer,
    Refuse,
    frame,
    header,
    message,
    parse,
    parse_header,
)
from omni_proxy.replica.pipeline.messages import Result
from tests.replica.kv_transfer.transfer_stages import long_prompt, stage

PROMPT = long_prompt(70, 40)
PATIENCE_SECS = 30
SIZES = {"layers": 4, "layer_bytes": 2 * 2 * 70 * 32 * 4, "logits_bytes": 512 * 4}
OFFER = message(FrameKind.OFFER, Offer(**SIZES, cached_tokens=0))
LAYER = header(FrameKind.DATA, SIZES["layer_bytes"]) + bytes(SIZES["layer_bytes"])


def read_exactly(peer, count) -> bytes:
    data = b""
    while len(data) < count:
        chunk = peer.recv(count - len(data))
        assert chunk, "the replica closed the connection"
        data += chunk
    return data


def read_frame(peer) -> tuple[FrameKind, bytes]:
    kind, length = parse_header(read_exactly(peer, HEADER.size))
    return kind, read_exactly(peer, length)


# Decode against a faulty prefill replica


@contextmanager
def fake_prefill(answer):
    """Listens; each connection's HELLO is read, then `answer(connection)` is called."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.settimeout(PATIENCE_SECS)
                    assert read_frame(peer)[0] is FrameKind.HELLO
                    answer(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Fetch("127.0.0.1", server.getsockname()[1], "kept:x", group="x")
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(PATIENCE_SECS)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def decode():
    with stage("decode", wait_secs=0.2, transfer_secs=0.2) as running:
        yield running


def until_closed(peer):
    with peer:
        while peer.recv(1 << 16):
            pass


def sends(*parts):
    def answer(peer):
        for part in parts:
            peer.sendall(part)

    return answer


def sends_and_waits(*parts):
    def answer(peer):
        sends(*parts)(peer)
        until_closed(peer)

    return answer


def sizes(**changed):
    return message(FrameKind.OFFER, Offer(**SIZES | {"cached_tokens": 0} | changed))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sends(), "closed the connection"),
        (sends(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "not the KV transfer port"),
        (sends(HEADER.pack(MAGIC, VERSION + 1, 3, 0)), f"version {VERSION + 1}"),
        (sends(HEADER.pack(MAGIC, VERSION, 3, 2**32 - 1)), "the limit is 65536"),
        (sends(HEADER.pack(MAGIC, VERSION, 99, 0)), "unknown kind 99"),
        (sends(frame(FrameKind.OFFER, b"\xc1")), "invalid Offer message"),
        (sends(frame(FrameKind.DONE)), "unexpected DONE frame"),
        (sends(message(FrameKind.REFUSE, Refuse("it is full"))), "it is full"),
        (sends(frame(FrameKind.WAIT), OFFER, LAYER), "closed the connection"),
        (sends(sizes(layers=5)), "other sizes"),
        (sends(sizes(layer_bytes=2**40)), "other sizes"),
        (sends(sizes(logits_bytes=0)), "other sizes"),
        (sends(sizes(cached_tokens=70)), "other sizes"),
        (sends(OFFER, frame(FrameKind.DATA, b"short")), "of 5 bytes, expected"),
        (sends(OFFER, LAYER, LAYER[: len(LAYER) // 2]), "closed the connection"),
        (sends_and_waits(), "nothing for 0.25 s"),
        (sends_and_waits(OFFER, LAYER[:-1]), "within 0.2 s"),
    ],
)
def test_decode_fails_its_request_and_continues(decode, answer, words):
    with fake_prefill(answer) as fetch:
        failure = decode.fail(PROMPT, fetch)
    assert failure.error.startswith("KVTransferError: prefill at 127.0.0.1:") or (
        failure.error.startswith("KVTransferError: 127.0.0.1:")
    )
    assert words in failure.error
    assert decode.facts()["fetching"] == 0
    assert decode.ask(PROMPT)["finish_reason"] == "length"


def test_a_prefill_that_reports_work_is_awaited(decode):
    more = threading.Event()

    def answer(peer):
        while not more.wait(0.05):  # longer in all than decode waits for a silent one
            peer.sendall(frame(FrameKind.WAIT))
        sends(message(FrameKind.REFUSE, Refuse("done waiting")))(peer)

    timer = threading.Timer(0.6, more.set)
    timer.start()
    with fake_prefill(answer) as fetch:
        assert "done waiting" in decode.fail(PROMPT, fetch).error
    timer.join()


def test_many_silent_prefills_do_not_keep_decode_from_other_requests(decode):
    with fake_prefill(sends_and_waits()) as fetch:
        fetches = [msgspec.structs.replace(fetch, group=str(index)) for index in range(20)]
        ids = [decode.submit(PROMPT, each) for each in fetches]
        assert decode.ask(PROMPT)["finish_reason"] == "length"
        assert all("KVTransferError" in decode.end(each).error for each in ids)


def test_an_aborted_fetch_closes_its_connection(decode):
    closed, begun = threading.Event(), threading.Event()

    def answer(peer):
        begun.set()
        until_closed(peer)
        closed.set()

    with stage("decode") as patient, fake_prefill(answer) as fetch:
        request_id = patient.submit(PROMPT, fetch)
        assert begun.wait(PATIENCE_SECS)
        patient.abort(request_id)
        assert closed.wait(PATIENCE_SECS)
        assert patient.facts()["fetching"] == 0


# Prefill against a faulty decode replica


@pytest.fixture(scope="module")
def prefill():
    with stage("prefill", wait_secs=20.0, transfer_secs=0.2) as running:
        yield running


@contextmanager
def connected(prefill):
    address = prefill.address["host"], prefill.address["port"]
    with socket.create_connection(address, PATIENCE_SECS) as peer:
        yield peer


def hello(prefill, key, **changed) -> bytes:
    worker = prefill.scheduler.worker
    own_identity = identity(worker, "default", weights_digest(worker))
    fields = {"engine_id": "", "prompt": prompt_digest(PROMPT), "tokens": len(PROMPT)} | changed
    return message(FrameKind.HELLO, Hello(key=key, identity=own_identity, **fields))


def kept_key(prefill) -> str:
    answer = prefill.ask(PROMPT, Serve(), max_new_tokens=1)
    return "kept:" + answer["kv_transfer_params"]["remote_request_id"]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0" * 12,
        b"POST / HTTP/1.1\r\n\r\n",
        frame(FrameKind.DONE),
        frame(FrameKind.HELLO, b"\xc1"),
        HEADER.pack(MAGIC, VERSION, 1, 2**32 - 1),
        b"GET " + b"x" * 10_000,
    ],
)
def test_prefill_closes_an_unknown_connection_and_continues(prefill, sent):
    with connected(prefill) as peer:
        peer.sendall(sent)
        if sent:
            with suppress(ConnectionResetError):
                assert peer.recv(1) == b""
    assert prefill.ask(PROMPT)["finish_reason"] == "length"


def test_prefill_reports_its_identity_over_http(prefill):
    for path, status in (("/query", b"200"), ("/health", b"200"), ("/route", b"404")):
        with connected(prefill) as peer:
            peer.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = b"".join(iter(lambda: peer.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == status
        if path == "/query":
            ranks = msgspec.json.decode(body)
            assert ranks == {"0": {"engine_id": prefill.address["engine_id"]}}


def test_a_kv_that_decode_does_not_read_is_freed_by_the_clock(prefill):
    key = kept_key(prefill)
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, key))
        assert prefill.until(lambda facts: facts["kept"] == 0)["kept_bytes"] == 0


def test_a_kv_is_freed_when_decode_is_lost_in_the_middle(prefill):
    key = kept_key(prefill)
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, key))
        offer = parse(read_frame(peer)[1], Offer)
        assert (offer.layers, offer.layer_bytes) == (SIZES["layers"], SIZES["layer_bytes"])
    assert prefill.until(lambda facts: facts["kept"] == 0)["kept_bytes"] == 0
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, key))
        kind, body = read_frame(peer)
    assert (kind, parse(body, Refuse).reason) == (
        FrameKind.REFUSE,
        f"no KV {key}: its transfer failed",
    )


@pytest.mark.parametrize("changed", [{"tokens": 69}, {"prompt": "another"}])
def test_a_kv_is_not_sent_for_another_prompt(prefill, changed):
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, kept_key(prefill), **changed))
        kind, body = read_frame(peer)
    assert (kind, parse(body, Refuse).reason) == (
        FrameKind.REFUSE,
        "the KV is that of another prompt",
    )


def test_a_room_whose_decode_is_lost_fails_at_once(prefill):
    request_id = prefill.submit(PROMPT, Serve("room:1", waits=True))
    prefill.admin("pause_generation", mode="in_place")
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, "room:1"))
        prefill.until(lambda facts: facts["waiting"] == 0)
    assert "decode replica disconnected" in prefill.end(request_id).error
    prefill.admin("continue_generation")
    assert prefill.ask(PROMPT)["finish_reason"] == "length"


def test_a_room_whose_decode_reads_nothing_fails_by_the_clock(prefill):
    request_id = prefill.submit(PROMPT, Serve("room:2", waits=True))
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, "room:2"))
        assert "did not receive the KV within 0.2 s" in prefill.end(request_id).error


def test_decode_is_notified_that_prefill_is_at_work():
    with stage("prefill", wait_secs=0.1) as busy:
        busy.admin("pause_generation", mode="in_place")
        request_id = busy.submit(PROMPT, Serve("room:3", waits=True))
        with connected(busy) as peer:
            peer.sendall(hello(busy, "room:3"))
            assert [read_frame(peer)[0] for _ in range(8)] == [FrameKind.WAIT] * 8
            busy.admin("continue_generation")
            while (kind := read_frame(peer)[0]) is FrameKind.WAIT:
                pass
            assert kind is FrameKind.OFFER
            for _ in range(SIZES["layers"] + 1):
                assert read_frame(peer)[0] is FrameKind.DATA
            peer.sendall(frame(FrameKind.DONE))
            assert isinstance(busy.end(request_id), Result)
