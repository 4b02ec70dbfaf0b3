"""What a request in two legs costs beside a plain one, and beside a router that does the same.

The workers answer at once, so that only the proxies' own work is measured; half of them are prefill
workers, which name a KV cache where they are asked for one.
"""

from collections.abc import Collection
from dataclasses import replace

from tools.bench.harness.peers import VERSIONS, borrowed
from tools.bench.harness.proxies import Place, Side, free_port, reconfigured, router_words

CONNECTORS = ("sglang", "nixl", "mooncake")
GOAL = 2.2  # times the CPU of a plain request
# Of each router the protocols that it has, with the words that ask for them.
ROUTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang-router": {"sglang": ("launch", "--pd-disaggregation")},
    "vllm-router": {
        connector: ("--vllm-pd-disaggregation", "--kv-connector", connector)
        for connector in ("nixl", "mooncake")
    },
}


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


def router_in_two_legs(name: str, connector: str) -> Side:
    """Raises NotInstalled."""
    program, mode = str(borrowed(name)), ROUTERS[name][connector]

    def command(place: Place) -> list[str]:
        urls = [f"http://127.0.0.1:{port}" for port in place.workers]
        half = len(urls) // 2
        return [
            *(program, *mode, "--host", "127.0.0.1", "--port", str(place.port)),
            *(word for url in urls[:half] for word in ("--prefill", url, _port(url, connector))),
            *(word for url in urls[half:] for word in ("--decode", url)),
            *router_words(name),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        ]

    return Side(f"{name} {VERSIONS[name]} {connector}", command)


def _port(url: str, connector: str) -> str:
    """Of the bootstrap server: the worker itself answers for Mooncake's."""
    return url.rpartition(":")[2] if connector == "mooncake" else "8998"


def sides(ours: Side, peers: Collection[str] = ()) -> list[Side]:
    """The plain one first. `peers`: those that know two legs are measured, too. Raises
    NotInstalled."""
    plain = replace(ours, name=f"{ours.name} plain")
    found = [plain, *(in_two_legs(ours, connector) for connector in CONNECTORS)]
    return found + [
        router_in_two_legs(name, connector)
        for name, modes in ROUTERS.items()
        if name in peers
        for connector in modes
    ]
