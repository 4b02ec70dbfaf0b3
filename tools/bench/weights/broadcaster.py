"""Rank 0 in a separate process: broadcasts the same touched blocks on each order.

`python -m tools.bench.weights.broadcaster` reads orders as JSON lines and answers with JSON lines.
Its group is like those of trainers; it imports nothing of the receiving side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tools.training.group import Group, GroupRendezvous

WAIT_SECS = 120.0


class Expected:
    """A stand-in for a trainer's init call: the bench itself starts the other ranks."""

    def refused(self) -> str:
        return ""

    def wait(self) -> str:
        return ""


def main() -> None:
    torch.set_num_threads(1)
    groups: dict[str, Group] = {}
    blocks: list[torch.Tensor] = []
    for order in _orders():
        match order:
            case {"do": "blocks", "count": count, "nbytes": nbytes}:
                blocks = [torch.full((nbytes,), n % 251, dtype=torch.uint8) for n in range(count)]
                _print_json(made=count)
            case {"do": "open", "group": name, "world": world}:
                groups[name] = group = Group(GroupRendezvous(name, world, "gloo", WAIT_SECS))
                _print_json(port=group.port)
                group.join(Expected())
                _print_json(joined=name)
            case {"do": "send", "group": name}:
                for block in blocks:
                    groups[name].broadcast(block)
                _print_json(sent=len(blocks))
            case _:
                raise ValueError(f"no such order: {order}")


def _orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _print_json(**reported: object) -> None:
    print(json.dumps(reported), flush=True)


if __name__ == "__main__":
    main()
