"""Transcripts: who sends what, and what the other side gets. Read from top to bottom.

A transcript is a sequence of steps of these kinds, played on a `both_drivers.World`:

    ("client", "sends", *chunks)     each chunk in an iteration of its own
    ("client", "gets", *parts)       what came since it was looked at last holds them, in this order
    ("client", "gets nothing")
    ("client", "closes")             ("client", "half-closes")
    ("client", "is", state)          "open", "closed" or "reset", as it sees the proxy
    ("worker", ...)                  likewise, on the connection that got something last
    ("clock", "moves", seconds)
    ("phases", "are", *names)        of the connections, as GET /status shows them
"""


def play(world, client, *steps):
    """Play the steps. What came before them counts as seen."""
    transcript = _Transcript(world, client)
    for number, step in enumerate(steps, start=1):
        try:
            transcript.play(*step)
        except AssertionError as failed:
            raise AssertionError(f"step {number}, {step}: {failed}") from failed


class _Transcript:
    def __init__(self, world, client):
        self._world, self._client = world, client
        self._worker = None  # the connection that got something last
        self._seen = {end: len(end.came) for end in (client, *world.lines)}

    def play(self, who, does, *what):
        if who == "clock":
            self._world.wait(*what)
        elif who == "phases":
            assert sorted(self._world.phases) == sorted(what), self._world.phases
        elif who == "worker" and does == "gets":
            self._worker = self._addressed_worker()
            self._expect(self._worker, what)
        else:
            end = self._client if who == "client" else self._worker
            assert end is not None, "no worker has got anything"
            self._act(end, does, what)

    def _addressed_worker(self):
        unread = [end for end in self._world.lines if len(end.came) > self._seen.get(end, 0)]
        assert len(unread) == 1, f"{len(unread)} connections to workers got something"
        return unread[0]

    def _act(self, end, does, what):
        match does:
            case "sends":
                for chunk in what:
                    end.sock.sendall(chunk)
                    self._world.turn()
            case "gets":
                self._expect(end, what)
            case "gets nothing":
                assert len(end.came) == self._seen.get(end, 0), end.came
            case "is":
                assert end.end == what[0], end.end
            case "closes":
                (end.leave if end is self._client else end.close)()
                self._world.turn()
            case "half-closes":
                end.leave(half=True)
                self._world.turn()
            case _:
                raise AssertionError(f"unknown: {does}")

    def _expect(self, end, parts):
        came, at = end.came[self._seen.get(end, 0) :], 0
        for part in parts:
            at = came.find(part, at)
            assert at >= 0, f"{part!r} is not, or not in this order, in {came!r}"
            at += len(part)
        self._seen[end] = len(end.came)
