"""A clock that a test moves."""


class ManualClock:
    """Replaces `time.monotonic`; returns `now`."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now
