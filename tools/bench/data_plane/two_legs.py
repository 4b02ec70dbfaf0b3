"""What a request in two legs costs beside a plain one, and beside a router that does the same.

The workers answer at once, so that only the proxies' own work is measured; half of them are prefill
workers, which name a KV cache where they are asked for one.
"""

from dataclasses import replace

from tools.bench.harness.peers import VERSIONS, borrowed
from tools.bench.harness.proxies import ROUTER_WORDS, Place, Side, free_port, reconfigured

CONNECTORS = ("sglang", "nixl", "mooncake")
GOAL = 2.2  # times the CPU of a plain request
ROUTER = "sglang-router"


def in_two_legs(ours: Side, connector: str) -> Side:
    """omni-proxy with the first half of its workers for prefill."""
    return reconfigured(ours, f"{ours.name} {connector}", lambda text: _roles(text, connector))


def _roles(config: str, connector: str) -> str:
    head, *workers = config.split("[[workers]]\n")
    half = len(workers) // 2
    entries = [
        f'[[workers]]\nrole = "{"prefill" if number < half else "decode"}"\n'
        f'kv_connector = "{connector}"\n{_bootstrap(worker, connector, number < half)}{worker}'
        for number, worker in enumerate(workers)
    ]
    return head + "".join(entries)


def _bootstrap(worker: str, connector: str, is_prefill: bool) -> str:
    """The worker itself answers what Mooncake's bootstrap server is asked."""
    if connector != "mooncake" or not is_prefill:
        return ""
    port = worker.partition('"\n')[0].rpartition(":")[2]
    return f"bootstrap_port = {port}\n"


def router_in_two_legs() -> Side:
    """Raises NotInstalled."""
    program = str(borrowed(ROUTER))

    def command(place: Place) -> list[str]:
        urls = [f"http://127.0.0.1:{port}" for port in place.workers]
        half = len(urls) // 2
        return [
            *(program, "launch", "--host", "127.0.0.1", "--port", str(place.port)),
            "--pd-disaggregation",
            *(word for url in urls[:half] for word in ("--prefill", url, "8998")),
            *(word for url in urls[half:] for word in ("--decode", url)),
            *ROUTER_WORDS,
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        ]

    return Side(f"{ROUTER} {VERSIONS[ROUTER]} two legs", command)


def sides(ours: Side, *, with_router: bool) -> list[Side]:
    """The plain one first. Raises NotInstalled."""
    plain = replace(ours, name=f"{ours.name} plain")
    found = [plain, *(in_two_legs(ours, connector) for connector in CONNECTORS)]
    return [*found, router_in_two_legs()] if with_router else found
