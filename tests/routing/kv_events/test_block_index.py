import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.routing.kv_events import block_index as tested
from omni_proxy.routing.kv_events.block_index import PREDICTED_SECS, BlockIndex
from omni_proxy.routing.kv_events.block_keys import block_keys, extend_keys
from omni_proxy.routing.kv_events.engine_blocks import ChangeOp, HeldChange
from tests.routing.kv_events.published import blocks_of
from tests.tree import ROOT

PROMPT = list(range(64))
SIZE = 16


def held(*prompts, holder="a", index=None):
    index = index or BlockIndex()
    index.apply(holder, [HeldChange(ChangeOp.BLOCK_SIZE, [SIZE]), HeldChange(ChangeOp.EXACT, [])])
    for tokens in prompts:
        index.apply(holder, [HeldChange(ChangeOp.STORE, list(block_keys(tokens, SIZE)))])
    return index


def depths(index, tokens=PROMPT, *, among=("a", "b", "c"), now=0.0):
    return index.depths(blocks_of(tokens, SIZE), index.mask_of(among), now)


def test_keys_are_equal_in_every_process():
    code = (
        "from omni_proxy.routing.kv_events.block_keys import block_keys;"
        "print(list(block_keys(range(64), 16)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == str(list(block_keys(PROMPT, SIZE)))


def test_a_key_identifies_all_tokens_up_to_the_end_of_its_block():
    keys = list(block_keys(PROMPT, SIZE))
    assert len(keys) == 4
    assert list(extend_keys(keys[1], PROMPT[32:], SIZE)) == keys[2:]
    other = [99, *PROMPT[1:]]
    assert not set(keys) & set(block_keys(other, SIZE))
    assert not set(keys) & set(block_keys(PROMPT, 8))
    assert list(block_keys(PROMPT[:63], SIZE)) == keys[:3]


def test_the_depth_of_a_holder_is_the_number_of_its_leading_blocks():
    index = held(PROMPT)
    held(PROMPT[:32], holder="b", index=index)
    assert depths(index) == {"a": 4, "b": 2}
    assert depths(index, [99, *PROMPT[1:]]) == {}
    depth, mask = index.match(blocks_of(PROMPT, SIZE), index.mask_of(("a", "b")), 0.0)
    assert (depth, index.holders_of(mask)) == (4, ["a"])
    assert depths(index, among=("b",)) == {"b": 2}
    assert index.blocks == 4


def test_a_missing_block_in_the_middle_ends_the_match():
    index = held(PROMPT)
    keys = list(block_keys(PROMPT, SIZE))
    index.apply("a", [HeldChange(ChangeOp.HOLES, []), HeldChange(ChangeOp.REMOVE, [keys[1]])])
    assert depths(index) == {"a": 1}
    assert (index.blocks, index.count("a")) == (3, 3)


def test_lost_blocks_are_never_matched_while_memory_is_freed():
    index = held(PROMPT)
    held(PROMPT[:16], holder="b", index=index)
    index.apply("a", [HeldChange(ChangeOp.RESET, [])])
    assert depths(index) == {"b": 1}
    held(PROMPT[:32], holder="c", index=index)
    assert depths(index) == {"b": 1, "c": 2}
    while index.maintain(0.0):
        assert depths(index) == {"b": 1, "c": 2}
    assert index.blocks == 2
    assert index.is_exact("a")


def test_a_forgotten_holder_is_no_longer_exact():
    index = held(PROMPT)
    index.forget("a")
    assert not index.is_exact("a")
    assert index.block_size("a") == 0


def test_a_sent_prompt_counts_as_cached_for_two_seconds():
    index = held()
    index.predict("a", blocks_of(PROMPT, SIZE), 10.0)
    assert depths(index, now=10.0 + PREDICTED_SECS - 0.1) == {"a": 4}
    assert depths(index, now=10.0 + PREDICTED_SECS) == {}
    index.predict("a", blocks_of(PROMPT, SIZE), 20.0)
    index.apply("a", [HeldChange(ChangeOp.RESET, [])])
    assert depths(index, now=20.0) == {}


def test_the_memory_of_old_predictions_is_freed():
    index = held()
    index.predict("a", blocks_of(PROMPT, SIZE), 10.0)
    index.maintain(10.0 + PREDICTED_SECS)
    index.maintain(10.0 + 2 * PREDICTED_SECS)
    assert not index._prediction_tables()


def test_of_sent_prompts_with_a_common_beginning_the_last_counts():
    index = held()
    index.predict("a", blocks_of([*PROMPT[:32], *range(100, 132)], SIZE), 10.0)
    index.predict("b", blocks_of(PROMPT, SIZE), 10.0)
    longer = [*PROMPT, *range(200, 232)]
    assert depths(index, PROMPT, now=11.0) == {"b": 4}
    assert depths(index, longer, now=11.0) == {"b": 4}


def test_the_memory_of_predictions_is_bounded(monkeypatch):
    monkeypatch.setattr(tested, "MAX_PREDICTED", 20_000)
    index = held()
    for first in range(100):
        index.predict("a", blocks_of([first] * 64, SIZE), 10.0)
    kept = {
        id(prediction) for by_key in index._prediction_tables() for prediction in by_key.values()
    }
    assert 10 < len(kept) < 50


class Model:
    """The blocks of each holder, as the tokens up to the end of each block."""

    def __init__(self):
        self.held = {}

    def depth(self, holder, tokens):
        depth = 0
        while depth < len(tokens) // 2 and tokens[: depth * 2 + 2] in self.held.get(holder, ()):
            depth += 1
        return depth


PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=8).map(tuple)
STEPS = st.tuples(
    st.sampled_from(["store", "store", "remove", "reset", "forget", "maintain"]),
    st.sampled_from("abc"),
    PROMPTS,
)


@given(st.lists(STEPS, max_size=30), PROMPTS)
@settings(max_examples=60)
def test_the_index_holds_what_a_naive_model_holds(steps, prompt):
    index, model = BlockIndex(), Model()
    for step, holder, tokens in steps:
        keys = list(block_keys(tokens, 2))
        blocks = {tokens[:end] for end in range(2, len(tokens) + 1, 2)}
        match step:
            case "store":
                index.apply(holder, [HeldChange(ChangeOp.STORE, keys)])
                model.held.setdefault(holder, set()).update(blocks)
            case "remove":
                holes = HeldChange(ChangeOp.HOLES, [])
                index.apply(holder, [holes, HeldChange(ChangeOp.REMOVE, keys[-1:])])
                model.held.get(holder, set()).discard(tokens[: len(keys) * 2])
            case "reset":
                index.apply(holder, [HeldChange(ChangeOp.RESET, [])])
                model.held.pop(holder, None)
            case "forget":
                index.forget(holder)
                model.held.pop(holder, None)
            case "maintain":
                index.maintain(0.0)
        depths_now = index.depths(blocks_of(prompt, 2), index.mask_of("abc"), 0.0)
        assert depths_now == {h: d for h in "abc" if (d := model.depth(h, prompt))}
        assert all(index.count(h) == len(model.held.get(h, ())) for h in "abc")
    while index.maintain(0.0):
        pass
    assert index.blocks == len(set().union(*model.held.values()))
