from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.head_caching.lru import Doorkeeper, LruCache

STEPS = st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 6)), max_size=60)


@given(STEPS, st.integers(1, 4))
def test_the_least_recently_used_entry_is_evicted(steps, most):
    cache = LruCache(most)
    model = []  # keys with values, the least recently used one first
    for number, (what, key) in enumerate(steps, 1):
        at = next((at for at, (known, _) in enumerate(model) if known == key), None)
        known = model.pop(at) if at is not None else None
        if what == "put":
            cache.put(key, number)
            model.append((key, number))
            model = model[-most:]
        else:
            assert cache.get(key) == (known and known[1])
            model += [known] if known else []
        assert len(cache) == len(model)


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 4))
def test_the_doorkeeper_admits_a_key_seen_again_soon(keys, most):
    doorkeeper = Doorkeeper(most)
    waiting = []  # the latest last
    for key in keys:
        assert doorkeeper.admits(key) == (key in waiting)
        if key in waiting:
            waiting.remove(key)
        else:
            waiting = [*waiting, key][-most:]
