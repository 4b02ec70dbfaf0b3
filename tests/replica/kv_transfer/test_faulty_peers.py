"""A replica whose peer speaks another protocol, is slow, sends wrong sizes, or is lost.

Raw sockets replace the peer.
"""

import socket
import threading
from contextlib import contextmanager, suppress

import msgspec
import pytest

from omni_proxy.replica.kv_transfer.request_fields import Fetch, Serve
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
    prompt_digest,
)
from omni_proxy.replica.models.text_model import weights_digest
from omni_proxy.replica.pipeline.stage_messages import Result
from omni_proxy.replica.text.transfer_scheduler import identity
from tests.replica.text.transfer_stages import long_prompt, stage

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
def fake_prefill(respond):
    """Reads HELLO from each connection, then calls `respond(connection)`."""
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
                    respond(peer)

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
    def respond(peer):
        for part in parts:
            peer.sendall(part)

    return respond


def sends_and_waits(*parts):
    def respond(peer):
        sends(*parts)(peer)
        until_closed(peer)

    return respond


def sizes(**changes):
    return message(FrameKind.OFFER, Offer(**SIZES | {"cached_tokens": 0} | changes))


@pytest.mark.parametrize(
    ("respond", "reason"),
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
def test_decode_fails_the_request_of_a_faulty_peer_and_serves_the_next(decode, respond, reason):
    with fake_prefill(respond) as fetch:
        failure = decode.fail(PROMPT, fetch)
    assert failure.error.startswith("KVTransferError: prefill at 127.0.0.1:") or (
        failure.error.startswith("KVTransferError: 127.0.0.1:")
    )
    assert reason in failure.error
    assert decode.facts()["fetching"] == 0
    assert decode.ask(PROMPT)["finish_reason"] == "length"


def test_decode_waits_for_a_prefill_that_sends_wait_frames(decode):
    finished = threading.Event()

    def respond(peer):
        while not finished.wait(0.05):  # in all longer than decode waits for a silent peer
            peer.sendall(frame(FrameKind.WAIT))
        sends(message(FrameKind.REFUSE, Refuse("done waiting")))(peer)

    timer = threading.Timer(0.6, finished.set)
    timer.start()
    with fake_prefill(respond) as fetch:
        assert "done waiting" in decode.fail(PROMPT, fetch).error
    timer.join()


def test_many_silent_prefills_do_not_block_other_requests_at_decode(decode):
    with fake_prefill(sends_and_waits()) as fetch:
        fetches = [msgspec.structs.replace(fetch, group=str(index)) for index in range(20)]
        ids = [decode.submit(PROMPT, each) for each in fetches]
        assert decode.ask(PROMPT)["finish_reason"] == "length"
        assert all("KVTransferError" in decode.end(request_id).error for request_id in ids)


def test_an_aborted_fetch_closes_its_connection(decode):
    closed, connected = threading.Event(), threading.Event()

    def respond(peer):
        connected.set()
        until_closed(peer)
        closed.set()

    with stage("decode") as other_decode, fake_prefill(respond) as fetch:
        request_id = other_decode.submit(PROMPT, fetch)
        assert connected.wait(PATIENCE_SECS)
        other_decode.abort(request_id)
        assert closed.wait(PATIENCE_SECS)
        assert other_decode.facts()["fetching"] == 0


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


def hello(prefill, key, **changes) -> bytes:
    worker = prefill.scheduler.worker
    own_identity = identity(worker, "default", weights_digest(worker))
    fields = {"engine_id": "", "prompt": prompt_digest(PROMPT), "tokens": len(PROMPT)} | changes
    return message(FrameKind.HELLO, Hello(key=key, identity=own_identity, **fields))


def kept_key(prefill) -> str:
    result = prefill.ask(PROMPT, Serve(), max_new_tokens=1)
    return "kept:" + result["kv_transfer_params"]["remote_request_id"]


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
def test_prefill_closes_an_invalid_connection_and_serves_the_next_request(prefill, sent):
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
            response = b"".join(iter(lambda: peer.recv(4096), b""))
        head, _, body = response.partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == status
        if path == "/query":
            ranks = msgspec.json.decode(body)
            assert ranks == {"0": {"engine_id": prefill.address["engine_id"]}}


def test_a_kv_that_decode_does_not_read_is_freed_after_the_timeout(prefill):
    key = kept_key(prefill)
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, key))
        assert prefill.until(lambda facts: facts["kept"] == 0)["kept_bytes"] == 0


def test_a_kv_is_freed_when_decode_is_lost_during_the_transfer(prefill):
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


@pytest.mark.parametrize("changes", [{"tokens": 69}, {"prompt": "another"}])
def test_a_kv_is_not_sent_for_another_prompt(prefill, changes):
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, kept_key(prefill), **changes))
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


def test_a_room_whose_decode_reads_nothing_fails_after_the_timeout(prefill):
    request_id = prefill.submit(PROMPT, Serve("room:2", waits=True))
    with connected(prefill) as peer:
        peer.sendall(hello(prefill, "room:2"))
        assert "did not receive the KV within 0.2 s" in prefill.end(request_id).error


def test_prefill_sends_wait_frames_until_its_kv_is_ready():
    with stage("prefill", wait_secs=0.1) as prefill:
        prefill.admin("pause_generation", mode="in_place")
        request_id = prefill.submit(PROMPT, Serve("room:3", waits=True))
        with connected(prefill) as peer:
            peer.sendall(hello(prefill, "room:3"))
            assert [read_frame(peer)[0] for _ in range(8)] == [FrameKind.WAIT] * 8
            prefill.admin("continue_generation")
            while (kind := read_frame(peer)[0]) is FrameKind.WAIT:
                pass
            assert kind is FrameKind.OFFER
            for _ in range(SIZES["layers"] + 1):
                assert read_frame(peer)[0] is FrameKind.DATA
            peer.sendall(frame(FrameKind.DONE))
            assert isinstance(prefill.end(request_id), Result)
