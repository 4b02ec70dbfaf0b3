"""Transcripts: what clients and workers send, and what the other side receives.

A transcript is a sequence of these steps, which `play` runs on a `both_drivers.World`:

    ("client", "sends", *chunks)     the event loop runs after each chunk
    ("client", "gets", *parts)       the bytes since the last "gets" contain these parts in order
    ("client", "gets nothing")
    ("client", "closes")             ("client", "half-closes")
    ("client", "is", state)          "open", "closed" or "reset": its connection to the proxy
    ("worker", ...)                  the same, on the worker connection that last "gets" something
    ("clock", "moves", seconds)
    ("phases", "are", *names)        of all connections, as GET /status shows them
"""


def play(world, client, *steps):
    """Run the steps. Bytes received before the first step are ignored."""
    transcript = _Transcript(world, client)
    for number, step in enumerate(steps, start=1):
        try:
            transcript.play(*step)
        except AssertionError as failed:
            raise AssertionError(f"step {number}, {step}: {failed}") from failed


class _Transcript:
    def __init__(self, world, client):
        self._world, self._client = world, client
        self._worker = None  # the connection of the last ("worker", "gets")
        self._seen = {peer: len(peer.received) for peer in (client, *world.worker_connections)}

    def play(self, who, does, *what):
        if who == "clock":
            self._world.wait(*what)
        elif who == "phases":
            assert sorted(self._world.phases) == sorted(what), self._world.phases
        elif who == "worker" and does == "gets":
            self._worker = self._addressed_worker()
            self._expect(self._worker, what)
        else:
            peer = self._client if who == "client" else self._worker
            assert peer is not None, "no worker has received anything"
            self._act(peer, does, what)

    def _addressed_worker(self):
        unread = [
            peer
            for peer in self._world.worker_connections
            if len(peer.received) > self._seen.get(peer, 0)
        ]
        assert len(unread) == 1, f"{len(unread)} connections to workers received bytes"
        return unread[0]

    def _act(self, peer, does, what):
        match does:
            case "sends":
                for chunk in what:
                    peer.sock.sendall(chunk)
                    self._world.run_until_idle()
            case "gets":
                self._expect(peer, what)
            case "gets nothing":
                assert len(peer.received) == self._seen.get(peer, 0), peer.received
            case "is":
                assert peer.state == what[0], peer.state
            case "closes":
                (peer.disconnect if peer is self._client else peer.close)()
                self._world.run_until_idle()
            case "half-closes":
                peer.disconnect(half=True)
                self._world.run_until_idle()
            case _:
                raise AssertionError(f"unknown: {does}")

    def _expect(self, peer, parts):
        received, at = peer.received[self._seen.get(peer, 0) :], 0
        for part in parts:
            at = received.find(part, at)
            assert at >= 0, f"{part!r} is missing or out of order in {received!r}"
            at += len(part)
        self._seen[peer] = len(peer.received)
