"""The cost of `feedback` of answers: `python -m tools.bench.cache.feedback`.

Counts the bytecodes of a small POST on the fast path with `cache_aware`: without `feedback`, with
it if answers report no cached tokens, and if each reports the predicted count. The counts don't
depend on other programs. `--functions` shows them by function. There are no bounds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from tools.bench.cache.kv_requests import counted_bytecodes
from tools.bench.data_plane.hand_driven import ANSWER, CLIENTS, RECEIVE_BYTES, DrivenDataPlane

WARM, ROUNDS = 30, 20
CONFIG = """[server]
access_log = "off"
[routing]
policy = "cache_aware"
[routing.cache_aware]
feedback = {feedback}
"""
PLAIN = b'{"id":"%b","choices":[{"message":{"content":"%b"}}]}'
USAGE = (
    b'{"id":"%b","choices":[{"message":{"content":"%b"}}],"usage":{"prompt_tokens":105,'
    b'"total_tokens":185,"completion_tokens":80,"prompt_tokens_details":{"cached_tokens":%d}}}'
)


class Case(NamedTuple):
    name: str
    feedback: bool
    cached: int  # cached tokens of 105; -1 for no usage in answers


CASES: Final = (
    Case("without feedback, no counts", False, -1),
    Case("feedback, no counts", True, -1),
    Case("without feedback, counts", False, 96),
    Case("feedback, counts that agree", True, 96),
)


class DrivenFeedback(DrivenDataPlane):
    """A driven data plane whose prompts have a common prefix."""

    def __init__(self, folder: Path, case: Case) -> None:
        config = CONFIG.format(feedback=str(case.feedback).lower())
        super().__init__(folder, config, workers=1)
        self._case = case

    def round(self) -> Counter[str]:
        """Bytecodes by function of one POST of every client."""
        with counted_bytecodes() as asked:
            ends = self.ask(stream=False, counted=False)
        for end, number in ends:
            if self._case.cached < 0:
                body = PLAIN % (number, b"tide " * 40)
            else:
                body = USAGE % (number, b"tide " * 40, self._case.cached)
            end.sendall(ANSWER % (len(body), body))
        with counted_bytecodes() as answered:
            self._turn(counted=False)
        for client in self.clients:
            assert client.recv(RECEIVE_BYTES).startswith(b"HTTP/1.1 200 ")
        return asked + answered


def measure(case: Case) -> Counter[str]:
    """Bytecodes of one POST by function of the data plane."""
    with tempfile.TemporaryDirectory(prefix="omni-proxy-bench-") as folder:
        driven = DrivenFeedback(Path(folder), case)
        try:
            for _ in range(WARM):
                driven.round()
            counts: Counter[str] = Counter()
            for _ in range(ROUNDS):
                counts += driven.round()
        finally:
            driven.close()
    posts = ROUNDS * CLIENTS
    return Counter(
        {name: round(count / posts) for name, count in counts.items() if "Driven" not in name}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the cost of feedback of answers.")
    parser.add_argument("--functions", action="store_true", help="the 25 that differ most")
    arguments = parser.parse_args()
    first: Counter[str] = Counter()
    for number, case in enumerate(CASES):
        counts = measure(case)
        if number % 2 == 0:
            first = counts
            print(f"{case.name:30} {counts.total():6} bytecodes")
            continue
        more = counts.total() - first.total()
        print(
            f"{case.name:30} {counts.total():6} bytecodes, {more:+} ({more / first.total():+.1%})"
        )
        if arguments.functions:
            counts.subtract(first)
            for name, count in counts.most_common(25):
                print(f"  {name:60} {count:+}")


if __name__ == "__main__":
    main()
