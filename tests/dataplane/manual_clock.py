"""A clock that a test moves."""


class ManualClock:
    """As `time.monotonic`; `now` is what it says."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now
