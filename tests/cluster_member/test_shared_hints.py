"""What proxies tell each other of caches and sessions, without a store between them."""

from datetime import UTC, datetime

from omni_proxy.cluster.messages import decode
from omni_proxy.cluster_member.shared_hints import MOST_HASHES, SharedHints
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
    """Its data plane is its own `HintsView`. `sent`: messages that left it."""

    def __init__(self, name, drawn=lambda _: 0, **routing):
        self.name, self.now, self.sent = name, 100.0, []
        self.fleet = Fleet()
        specs = [
            WorkerSpec(url, None, frozenset(CAPABILITIES), False, 1, 0, "file") for url in URLS
        ]
        self.fleet.apply(specs, datetime.now(UTC))
        table = ClusterConfig(url="redis://nowhere")
        config = Config(cluster=table, routing=RoutingConfig(sticky_sessions=True, **routing))
        self.dataplane = DataPlane(
            self.fleet, config, admin_socket="", sources=Sources(drawn, lambda: self.now)
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
    """Everything that it has to say, and how many bytes that was."""
    proxy.sent = []
    before = -1
    while before < len(proxy.sent):
        before = len(proxy.sent)
        await proxy.shared.tick(proxy, proxy.name)
    for payload in proxy.sent:
        for other in others:
            other.shared.take(decode(payload))
    return proxy.sent


async def test_a_prompt_follows_its_beginning_from_proxy_to_proxy():
    one, two = Proxy("one", policy="cache_aware"), Proxy("two", policy="cache_aware")
    at = {text: one.pick(text) for text in PROMPTS}
    assert len(set(at.values())) > 1
    await publish(one, two)
    assert {text: two.pick(text + "and more") for text in PROMPTS} == at
    assert two.dataplane.policy.stats()["picks"] == {"published": len(PROMPTS)}
    await publish(two, one)
    grown = PROMPTS[0] + "and more" + "m" * 2000
    assert one.pick(grown) == at[PROMPTS[0]]


async def test_a_prompt_is_published_once_and_never_spelled_out():
    one = Proxy("one", policy="cache_aware")
    for _ in range(3):
        one.pick(PROMPTS[0], "a secret")
    first = await publish(one)
    assert await publish(one) == []
    text = b"".join(first)
    assert len(text) < 400
    assert b"secret" not in text
    assert PROMPTS[0][:16].encode() not in text


async def test_a_cache_that_was_emptied_is_so_at_each_proxy():
    one, two = Proxy("one", policy="cache_aware"), Proxy("two", policy="cache_aware")
    home = one.pick(PROMPTS[0])
    await publish(one, two)
    two.fleet.cache_cleared(two.fleet.find(home))
    await publish(two, one)
    for proxy in (one, two):
        _, reason = proxy.dataplane.policy.preview_pick(proxy.fleet.workers, chat(PROMPTS[0]))
        assert "only 0 of" in reason
    assert one.pick(PROMPTS[0]) in URLS
    (message,) = await publish(one, two)  # it is new there
    assert two.hints.stats()["prefixes"] > 0
    assert message


async def test_a_session_stays_at_its_worker_through_each_proxy_and_moves_at_all():
    one, two = Proxy("one"), Proxy("two")
    one.pick("")  # so that their turns differ
    homes = {name: one.pick("", name) for name in ("x", "y", "z")}
    assert len(set(homes.values())) == 3
    await publish(one, two)
    assert {name: two.pick("", name) for name in homes} == homes
    home = two.fleet.find(homes["x"])
    others = [worker for worker in two.fleet.workers if worker is not home]
    moved = two.dataplane.policy.pick(others, chat("", key="x")).url
    await publish(two, one)
    assert one.pick("", "x") == moved != homes["x"]
    assert one.dataplane.finish_session("y")
    await publish(one, two)
    assert not two.dataplane.finish_session("y")


async def test_sessions_that_begin_elsewhere_are_load():
    one, two = Proxy("one", sticky_load="sessions"), Proxy("two", sticky_load="sessions")
    for name in ("x", "y", "z"):
        one.pick("", name)
    await publish(one, two)
    assert sorted(map(two.dataplane.session_count, two.fleet.workers)) == [0, 1, 1, 1]
    (idle,) = [w.url for w in two.fleet.workers if not two.dataplane.session_count(w)]
    assert two.pick("", "new") == idle


async def test_a_session_that_is_used_at_one_proxy_expires_at_none():
    one, two = Proxy("one", sticky_idle_secs=40), Proxy("two", sticky_idle_secs=40)
    home = one.pick("", "x")
    for _ in range(10):
        for proxy in (one, two):
            proxy.now += 11
            proxy.dataplane.loop.now = proxy.now
            proxy.dataplane.policy.maintain(proxy.now)
        assert one.pick("", "x") == home
        await publish(one, two)
    two.pick("", "another")
    assert two.pick("", "x") == home


async def test_two_proxies_that_begin_a_session_at_once_agree_afterwards():
    one, two = Proxy("one"), Proxy("two")
    two.pick("")
    two.now += 0.01
    assert one.pick("", "x") != two.pick("", "x")
    await one.shared.tick(one, "one")
    await two.shared.tick(two, "two")
    for sender, receiver in ((one, two), (two, one)):
        for payload in sender.sent:
            receiver.shared.take(decode(payload))
    assert one.pick("", "x") == two.pick("", "x")


async def test_a_proxy_that_joins_learns_what_the_others_know():
    one, late = Proxy("one", policy="cache_aware"), Proxy("late", policy="cache_aware")
    at, home = one.pick(PROMPTS[0]), one.pick("", "x")
    await publish(one)
    one.shared.repeat()
    await publish(one, late)
    assert (late.pick(PROMPTS[0]), late.pick("", "x")) == (at, home)


async def test_a_publication_is_bounded_and_the_rest_follows():
    one = Proxy("one", policy="cache_aware")
    for text in unrelated(90, 4000):
        one.pick(text)
    waiting = one.hints.stats()["unpublished"]
    await one.shared.tick(one, "one")
    assert one.hints.stats()["unpublished"] == waiting - MOST_HASHES
    assert sum(map(len, one.sent)) < 9 * MOST_HASHES
