"""Hints about caches and sessions that proxies exchange, here without a store."""

from datetime import UTC, datetime

from omni_proxy.cluster.messages import decode
from omni_proxy.cluster_member.shared_hints import MAX_HASHES, SharedHints
from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.schema import Config, RoutingConfig
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.fleet.registry import Fleet
from tests.routing.policies.chats import chat, unrelated

URLS = tuple(f"http://{name}:1" for name in "abcd")
PROMPTS = unrelated(6, 3000)


class Proxy:
    """A proxy that is its own `HintsView`. `sent`: the messages that it has published."""

    def __init__(self, name, draw=lambda _: 0, **routing):
        self.name, self.now, self.sent = name, 100.0, []
        self.fleet = Fleet()
        specs = [
            WorkerSpec(url, None, frozenset(CAPABILITIES), False, 1, 0, "file") for url in URLS
        ]
        self.fleet.apply(specs, datetime.now(UTC))
        table = ClusterConfig(url="redis://nowhere")
        config = Config(cluster=table, routing=RoutingConfig(sticky_sessions=True, **routing))
        self.dataplane = DataPlane(
            self.fleet, config, admin_socket="", sources=Sources(draw, lambda: self.now)
        )
        self.hints = self.dataplane.cluster_hints
        self.shared = SharedHints(self.fleet, self, lambda: self.now, lambda: table)

    def receive_prefixes(self, hashes):
        self.hints.prefixes.add(hashes)

    def spread_prefixes(self, hashes):
        pass

    def place_sessions(self, sessions):
        for digest, key in sessions.items():
            self.dataplane.place_session(digest, self.hints.target(key))

    def confirm_sessions(self, sessions):
        pass

    def forget_cache(self, worker):
        self.dataplane.forget_cache(worker)

    async def call(self, *commands):
        self.sent += [payload for _, _, payload in commands]

    def pick(self, text, session=""):
        return self.dataplane.policy.pick(self.fleet.workers, chat(text, key=session)).url


async def publish(proxy, *others):
    """Publishes all pending hints of a proxy to the others; returns the messages."""
    proxy.sent = []
    before = -1
    while before < len(proxy.sent):
        before = len(proxy.sent)
        await proxy.shared.tick(proxy, proxy.name)
    for payload in proxy.sent:
        for other in others:
            other.shared.take(decode(payload))
    return proxy.sent


async def test_a_prompt_goes_to_the_worker_of_its_beginning_at_every_proxy():
    first, two = Proxy("first", policy="cache_aware"), Proxy("two", policy="cache_aware")
    at = {text: first.pick(text) for text in PROMPTS}
    assert len(set(at.values())) > 1
    await publish(first, two)
    assert {text: two.pick(text + "and more") for text in PROMPTS} == at
    assert two.dataplane.policy.stats()["picks"] == {"published": len(PROMPTS)}
    await publish(two, first)
    longer = PROMPTS[0] + "and more" + "m" * 2000
    assert first.pick(longer) == at[PROMPTS[0]]


async def test_a_prompt_is_published_once_and_only_as_hashes():
    first = Proxy("first", policy="cache_aware")
    for _ in range(3):
        first.pick(PROMPTS[0], "a secret")
    sent = await publish(first)
    assert await publish(first) == []
    text = b"".join(sent)
    assert len(text) < 400
    assert b"secret" not in text
    assert PROMPTS[0][:16].encode() not in text


async def test_a_cleared_cache_is_cleared_at_each_proxy():
    first, two = Proxy("first", policy="cache_aware"), Proxy("two", policy="cache_aware")
    home = first.pick(PROMPTS[0])
    await publish(first, two)
    two.fleet.cache_cleared(two.fleet.find(home))
    await publish(two, first)
    for proxy in (first, two):
        _, reason = proxy.dataplane.policy.preview_pick(proxy.fleet.workers, chat(PROMPTS[0]))
        assert "only 0 of" in reason
    assert first.pick(PROMPTS[0]) in URLS
    (message,) = await publish(first, two)  # the prompt is new at that worker
    assert two.hints.stats()["prefixes"] > 0
    assert message


async def test_a_session_has_the_same_worker_at_all_proxies_also_after_a_move():
    first, two = Proxy("first"), Proxy("two")
    first.pick("")  # so that the next picks of the proxies differ
    homes = {name: first.pick("", name) for name in ("x", "y", "z")}
    assert len(set(homes.values())) == 3
    await publish(first, two)
    assert {name: two.pick("", name) for name in homes} == homes
    home = two.fleet.find(homes["x"])
    others = [worker for worker in two.fleet.workers if worker is not home]
    moved = two.dataplane.policy.pick(others, chat("", key="x")).url
    await publish(two, first)
    assert first.pick("", "x") == moved != homes["x"]
    assert first.dataplane.finish_session("y")
    await publish(first, two)
    assert not two.dataplane.finish_session("y")


async def test_sessions_of_other_proxies_count_as_load():
    first, two = Proxy("first", sticky_load="sessions"), Proxy("two", sticky_load="sessions")
    for name in ("x", "y", "z"):
        first.pick("", name)
    await publish(first, two)
    assert sorted(map(two.dataplane.session_count, two.fleet.workers)) == [0, 1, 1, 1]
    (idle,) = [w.url for w in two.fleet.workers if not two.dataplane.session_count(w)]
    assert two.pick("", "new") == idle


async def test_a_session_that_is_used_at_one_proxy_expires_at_no_proxy():
    first, two = Proxy("first", sticky_idle_secs=40), Proxy("two", sticky_idle_secs=40)
    home = first.pick("", "x")
    for _ in range(10):
        for proxy in (first, two):
            proxy.now += 11
            proxy.dataplane.loop.now = proxy.now
            proxy.dataplane.policy.maintain(proxy.now)
        assert first.pick("", "x") == home
        await publish(first, two)
    two.pick("", "another")
    assert two.pick("", "x") == home


async def test_two_proxies_that_begin_a_session_concurrently_agree_afterwards():
    first, two = Proxy("first"), Proxy("two")
    two.pick("")
    two.now += 0.01
    assert first.pick("", "x") != two.pick("", "x")
    await first.shared.tick(first, "first")
    await two.shared.tick(two, "two")
    for sender, receiver in ((first, two), (two, first)):
        for payload in sender.sent:
            receiver.shared.take(decode(payload))
    assert first.pick("", "x") == two.pick("", "x")


async def test_a_joining_proxy_gets_all_hints():
    first, joining = Proxy("first", policy="cache_aware"), Proxy("joining", policy="cache_aware")
    at, home = first.pick(PROMPTS[0]), first.pick("", "x")
    await publish(first)
    first.shared.repeat()
    await publish(first, joining)
    assert (joining.pick(PROMPTS[0]), joining.pick("", "x")) == (at, home)


async def test_a_publication_is_bounded_and_the_rest_follows_later():
    first = Proxy("first", policy="cache_aware")
    for text in unrelated(90, 4000):
        first.pick(text)
    waiting = first.hints.stats()["unpublished"]
    await first.shared.tick(first, "first")
    assert first.hints.stats()["unpublished"] == waiting - MAX_HASHES
    assert sum(map(len, first.sent)) < 9 * MAX_HASHES
