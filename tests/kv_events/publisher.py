"""A publisher of KV events like vLLM's: a PUB socket, and a ROUTER socket that replays batches."""

import threading
import time
from contextlib import contextmanager

import msgspec
import zmq

SIZE = 4
END = b"\xff" * 8


def stored(tokens, parent=None):
    names, parent_hash = [], parent
    for end in range(SIZE, len(tokens) + 1, SIZE):
        parent_hash = hash((parent_hash, tuple(tokens[end - SIZE : end]))) & ((1 << 64) - 1)
        names.append(parent_hash)
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent,
        "token_ids": list(tokens[: len(names) * SIZE]), "block_size": SIZE, "medium": "GPU",
    }  # fmt: skip


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """`batches`: those that are replayed on request."""

    def __init__(self, context, *, replays=True):
        self.batches = []
        self._number = 0
        self._context = context
        self._pub = context.socket(zmq.PUB)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.replay_endpoint = ""
        self._ended = threading.Event()
        self._thread = None
        if replays:
            router = context.socket(zmq.ROUTER)
            self.replay_endpoint = (
                f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
            )
            self._thread = threading.Thread(target=self._replay, args=(router,))
            self._thread.start()

    def publish(self, *events, lost=False):
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self.batches.append((number, payload))
        if not lost:
            self._pub.send_multipart([b"", number, payload])

    def _replay(self, router):
        with router:
            while not self._ended.is_set():
                if not router.poll(20):
                    continue
                requester, _, start = router.recv_multipart()
                for number, payload in list(self.batches):
                    if number >= start:
                        router.send_multipart([requester, b"", b"", number, payload])
                router.send_multipart([requester, b"", b"", END, b""])

    def close(self):
        self._ended.set()
        if self._thread:
            self._thread.join()
        self._pub.close(0)


@contextmanager
def publishers(*replays):
    """A publisher for each of `replays`, which is whether it has a replay socket."""
    context = zmq.Context()
    started = [Publisher(context, replays=each) for each in replays]
    try:
        yield started
    finally:
        for publisher in started:
            publisher.close()
        context.destroy(0)
