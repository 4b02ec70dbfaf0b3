"""Chat requests and workers for the tests of policies."""

from omni_proxy.config.schema import CacheAware, Routing
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing import policies
from omni_proxy.routing.inspect import Need, Payload
from tests.fleet.entries import NOW, entry

NEED = Need(0)


def workers(*in_flight, **fields):
    made = [Worker(entry(f"w{number}", **fields), NOW) for number in range(len(in_flight))]
    for worker, count in zip(made, in_flight, strict=True):
        worker.in_flight = count
    return made


def weighing(*weights):
    return [Worker(entry(f"w{n}", weight=weight), NOW) for n, weight in enumerate(weights)]


def chat(text, model=None, key=""):
    body = Payload(messages=[{"role": "user", "content": text}])
    return Need(0, model=model, body=body, key=key)


def first(_):
    return 0


def build(policy, below=first, **more):
    return policies.build(Routing(policy=policy, **more), below, 0.0)


def cache_aware(**rules):
    return build("cache_aware", cache_aware=CacheAware(**rules))
