"""The cost of a request in two legs, compared with a plain one and with other routers.

The workers answer immediately, so that only the proxies' own work is measured; half of them are
prefill workers, which return KV transfer parameters if the request asks for them.
"""

from collections.abc import Collection
from dataclasses import replace

from tools.bench.harness.peers import VERSIONS, borrowed
from tools.bench.harness.proxies import Place, Side, free_port, reconfigured, router_words

CONNECTORS = ("sglang", "nixl", "mooncake")
GOAL = 2.2  # times the CPU of a plain request
# Each router's protocols, with the arguments that enable them.
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
    """The lines for Mooncake's bootstrap server, for which the worker itself answers."""
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
    """The bootstrap server's port; for Mooncake, the worker itself answers."""
    return url.rpartition(":")[2] if connector == "mooncake" else "8998"


def sides(ours: Side, peers: Collection[str] = ()) -> list[Side]:
    """The sides, the plain one first, with those of `peers` that support two legs.

    Raises NotInstalled.
    """
    plain = replace(ours, name=f"{ours.name} plain")
    found = [plain, *(in_two_legs(ours, connector) for connector in CONNECTORS)]
    return found + [
        router_in_two_legs(name, connector)
        for name, modes in ROUTERS.items()
        if name in peers
        for connector in modes
    ]
