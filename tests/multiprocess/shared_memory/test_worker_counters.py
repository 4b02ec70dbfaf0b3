from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.multiprocess.shared_memory.worker_counters import FreeSlots

COUNT = 5


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sets(st.integers(1, COUNT)))))
def test_a_cell_is_acquired_once_and_the_one_free_for_longest_first(steps):
    cells = FreeSlots(COUNT)
    taken: list[int] = []
    free = list(range(1, COUNT))  # in the order of release
    for takes, which, in_use in steps:
        if takes:
            expected = next((cell for cell in free if cell not in in_use), COUNT)
            fresh = cells.highest < COUNT - 1  # a cell that was never used has no count
            expected = free[0] if fresh else expected
            assert cells.acquire(in_use.__contains__) == expected
            if expected != COUNT:
                passed_over = free[: free.index(expected)]
                free = free[free.index(expected) + 1 :] + passed_over
            else:
                free = list(free)
            taken.append(expected)
            assert cells.highest >= max(taken)
        elif taken:
            cell = taken.pop(which % len(taken))
            cells.release(cell)
            if cell != COUNT:
                free.append(cell)
        own = [cell for cell in taken if cell != COUNT]
        assert len(set(own)) == len(own)
