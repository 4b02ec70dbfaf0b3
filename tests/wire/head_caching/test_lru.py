from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.head_caching.lru import Doorkeeper, LruCache

STEPS = st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 6)), max_size=60)


@given(STEPS, st.integers(1, 4))
def test_the_least_recently_used_entry_is_evicted(steps, most):
    cache = LruCache(most)
    model = []  # pairs of key and value, the least recently used first
    for number, (what, key) in enumerate(steps, 1):
        at = next((at for at, (other, _) in enumerate(model) if other == key), None)
        entry = model.pop(at) if at is not None else None
        if what == "put":
            cache.put(key, number)
            model.append((key, number))
            model = model[-most:]
        else:
            assert cache.get(key) == (entry and entry[1])
            model += [entry] if entry else []
        assert len(cache) == len(model)


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 4))
def test_the_doorkeeper_admits_a_key_seen_again_soon(keys, most):
    doorkeeper = Doorkeeper(most)
    seen_once = []  # the latest last
    for key in keys:
        assert doorkeeper.admits(key) == (key in seen_once)
        if key in seen_once:
            seen_once.remove(key)
        else:
            seen_once = [*seen_once, key][-most:]
