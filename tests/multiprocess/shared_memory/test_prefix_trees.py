"""A prefix tree is handed from one program to its successor as bytes."""

import os
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.multiprocess.shared_memory.prefix_trees import (
    UnreadableTree,
    decode_tree,
    encode_tree,
    read_trees,
    restore_tree,
    tree_file,
    write_trees,
)
from omni_proxy.routing.prefix_tree import PrefixTree, TreeColumns
from tests.routing.test_prefix_tree import audit

texts = st.text("ab", max_size=9).map(str.encode) | st.binary(max_size=12)
uses = st.lists(st.tuples(texts, st.sampled_from("xyz")), max_size=30)


def copy_of(tree, size=1 << 20):
    """The tree that another program builds from the bytes."""
    columns = tree.columns()
    data = b"".join(encode_tree(columns))
    copy = PrefixTree(size)
    restore_tree(copy, decode_tree(data, len(columns.labels), columns.names), lambda: True)
    audit(copy)
    return copy


def filled(pairs, forgotten=""):
    tree = PrefixTree(1 << 20)
    for text, holder in pairs:
        tree.insert(text, holder)
    tree.forget(forgotten)
    return tree


@given(uses, uses, st.sampled_from(["", "x"]))
def test_a_copy_gives_the_same_matches_as_the_tree(pairs, later, forgotten):
    tree = filled(pairs, forgotten)
    for text, holder in later:
        tree.insert(text, holder)
    copy = copy_of(tree)
    for text, _ in [*pairs, *later]:
        assert copy.depths(text + b"more") == tree.depths(text + b"more")
    assert copy.size <= tree.size
    assert all(copy.size_of(holder) == tree.size_of(holder) for holder in tree.holders())
    for text, holder in [*later, *pairs]:
        copy.insert(text + b"more", holder)
    audit(copy)


def test_a_copy_evicts_the_least_recently_used_texts_first():
    tree = filled((b"%03d" % number * 100, "x") for number in range(100))
    tree.insert(b"000" * 100, "x")
    copy = copy_of(tree, 20_000)
    while copy.maintain(evict=True):
        pass
    kept = [copy.match(b"%03d" % number * 100)[0] == 300 for number in range(100)]
    assert kept[0]
    assert not kept[1]
    assert kept[90:] == [True] * 10


def test_an_empty_tree_is_copied():
    assert copy_of(PrefixTree(9)).nodes == 0


@given(st.data())
def test_an_invalid_tree_is_refused(data):
    count = data.draw(st.integers(0, 5))
    numbers = st.lists(st.integers(0, count + 1), min_size=count, max_size=count)
    labels = data.draw(st.lists(st.sampled_from([b"", b"a", b"bb"]), max_size=6))
    masks = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    parents, newer = array("I", data.draw(numbers)), array("I", data.draw(numbers))
    tree = PrefixTree(1 << 20)
    try:
        restore_tree(tree, TreeColumns(labels, masks, parents, newer, ["x", None]), lambda: True)
    except UnreadableTree:
        assert not tree.nodes
        assert not tree.holders()
    else:
        audit(tree)


@pytest.mark.parametrize("size", [0, 11, 30])
def test_truncated_bytes_are_refused(size):
    columns = filled([(b"abc", "x"), (b"abd", "y")]).columns()
    data = b"".join(encode_tree(columns))
    with pytest.raises(UnreadableTree):
        decode_tree(data[:size], len(columns.labels), columns.names)
    with pytest.raises(UnreadableTree):
        decode_tree(data + b"x", len(columns.labels), columns.names)


class Named:
    def __init__(self, url):
        self.url = url


def through_file(trees, holders, keep_reading=lambda: True, cut=0):
    """The trees that another program reads from the file."""
    file = tree_file()
    try:
        write_trees(file, {role: tree.columns() for role, tree in trees.items()})
        os.ftruncate(file, os.fstat(file).st_size - cut)
        return read_trees(file, holders, keep_reading)
    finally:
        os.close(file)


def tree_of(*pairs):
    tree = PrefixTree(1 << 20)
    for text, holder in pairs:
        tree.insert(text, holder)
    return tree


def test_a_file_has_the_trees_of_all_pools_without_removed_workers():
    holders = {each.url: each for each in map(Named, ("http://one", "http://three"))}
    first, second = Named("http://one"), Named("http://two")
    trees = {
        "regular": tree_of((b"abc", first), (b"abd", second)),
        "prefill": tree_of((b"xyz", first)),
    }
    copies = through_file(trees, holders)
    assert set(copies) == {"regular", "prefill"}
    assert copies["regular"].depths(b"abc") == {holders["http://one"]: 3}
    assert copies["regular"].depths(b"abd") == {holders["http://one"]: 2}
    assert copies["prefill"].depths(b"xyzz") == {holders["http://one"]: 3}


def test_of_a_file_that_takes_too_long_to_read_the_newest_texts_are_kept():
    worker = Named("http://one")
    trees = {"regular": tree_of(*((b"%05d" % number, worker) for number in range(20_000)))}
    turns = iter((True, False))
    (copy,) = through_file(trees, {worker.url: worker}, lambda: next(turns)).values()
    assert copy.match(b"19999")[0] == 5
    assert copy.match(b"00000")[0] < 5
    audit(copy)


@pytest.mark.parametrize("cut", [1, 4, 40])
def test_a_file_whose_writer_was_stopped_is_refused(cut):
    worker = Named("http://one")
    with pytest.raises(UnreadableTree):
        through_file({"regular": tree_of((b"abc", worker))}, {}, cut=cut)


def test_an_empty_file_has_no_tree():
    file = tree_file()
    assert read_trees(file, {}, lambda: True) == {}
    os.close(file)
