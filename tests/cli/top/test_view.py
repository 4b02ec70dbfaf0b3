import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_proxy.cli.client.feed_model import feed_of
from omni_proxy.cli.top.view import ORDERS, QUIT, Click, PendingAction, TopView
from tests.cli.feeds import feed, row
from tests.example_counts import examples


def view_of(*rows):
    view = TopView()
    view.show(feed_of(feed(*rows)))
    return view


def names(view):
    return [row.name for row in view.rows]


@pytest.fixture
def three():
    return view_of(
        row("a:1", first_p50_ms=5.0, in_flight=1),
        row("b:1", first_p50_ms=None, in_flight=9),
        row("c:1", first_p50_ms=9.0, errors=7),
    )


def test_rows_with_problems_are_first_then_busy_ones(three):
    assert names(three) == ["c:1", "b:1", "a:1"]
    assert three.row.name == "c:1"


def test_columns_sort_the_greatest_first_and_unknown_values_last(three):
    for _ in range([name for name, _, _ in ORDERS].index("P50")):
        assert three.press("right") is None
    assert names(three) == ["c:1", "a:1", "b:1"]
    three.press("r")
    assert names(three) == ["a:1", "c:1", "b:1"]
    assert three.row.name == "a:1"


def test_rows_without_problems_can_be_hidden(three):
    three.press("o")
    assert names(three) == ["c:1"]
    three.press("o")
    assert len(names(three)) == 3


@pytest.mark.parametrize(
    ("key", "action"), [("d", "disable"), ("e", "enable"), ("D", "drain"), ("v", "revive")]
)
def test_a_change_needs_a_confirmation(three, key, action):
    three.press("down")
    assert three.press(key) is None
    assert three.pending == PendingAction(action, three.row.id, "b:1")
    assert three.press("y") == PendingAction(action, "http%3A%2F%2Fb:1", "b:1")
    assert three.press(key) is None
    assert three.press("q") is None  # means no, and does not quit
    assert three.pending is None
    assert three.message == "cancelled"
    assert three.press("q") == QUIT


def test_a_confirmed_action_applies_to_the_worker_it_was_requested_for(three):
    three.press("d")
    three.show(feed_of(feed(row("z:1"))))
    assert three.press("y").worker_name == "c:1"


def test_a_search_filters_the_rows_while_it_is_typed(three):
    for key in "/B:":
        assert three.press(key) is None
    assert names(three) == ["b:1"]
    three.press("d")  # a letter of the search
    assert (names(three), three.pending) == ([], None)
    three.press("backspace")
    three.press("enter")
    assert (names(three), three.row.name) == (["b:1"], "b:1")
    three.press("d")
    assert three.pending.worker_name == "b:1"
    three.press("n")
    three.press("escape")
    assert len(names(three)) == 3
    assert three.row.name == "b:1"


def test_a_search_matches_models_and_states_and_stays_over_snapshots():
    rows = [row("a:1", model="qwen"), row("b:1", routable=False, health="dead")]
    view = view_of(*rows)
    for key in ("/", *"dea", "enter"):
        view.press(key)
    assert names(view) == ["b:1"]
    view.show(feed_of(feed(*rows, row("c:1", routable=False, health="dead"))))
    assert names(view) == ["b:1", "c:1"]
    for key in ("escape", "/", *"QWE", "escape", "q"):
        result = view.press(key)
    assert result == QUIT


def test_any_key_closes_the_help_and_does_nothing_else(three):
    three.press("?")
    assert three.help_open
    assert three.press("d") is None
    assert (three.help_open, three.pending) == (False, None)
    three.press("?")
    assert three.press("ctrl-c") == QUIT


def test_a_click_selects_a_row_or_sorts_by_a_title(three):
    three.title, three.title_line, three.first = "WORKER  STATE  BUSY", 5, 0
    three.set_page_rows(3)
    three.press(Click(1, 7))
    assert three.row.name == "b:1"
    three.press(Click(16, 5))
    assert (ORDERS[three.order][0], three.reversed) == ("BUSY", False)
    three.title = "WORKER  STATE  BUSY▼"
    three.press(Click(15, 5))
    assert three.reversed
    before = (three.order, three.selected)
    for line, column in ((5, 7), (5, 90), (4, 1), (9, 1), (0, 0)):
        three.press(Click(column, line))
    assert (three.order, three.selected) == before


def test_a_click_cancels_a_pending_action(three):
    three.press("d")
    assert three.press(Click(0, 0)) is None
    assert (three.pending, three.message) == (None, "cancelled")


def test_the_wheel_moves_the_selection(three):
    three.press("wheeldown")
    assert three.index == 2
    three.press("wheelup")
    assert three.index == 0


def test_an_empty_fleet_has_no_action():
    view = view_of()
    view.press("d")
    assert (view.pending, view.row) == (None, None)
    assert "no worker" in view.message


class ViewMachine(RuleBasedStateMachine):
    """Random snapshots of a fleet, and random keys."""

    @initialize()
    def begin(self):
        self.view = TopView()

    @rule(count=st.integers(0, 30), busy=st.integers(0, 5))
    def snapshots(self, count, busy):
        before = self.view.selected
        rows = [row(f"h{n}:1", in_flight=n % (busy + 1), errors=n % 7) for n in range(count)]
        self.view.show(feed_of(feed(*rows)))
        if before in {row.id for row in self.view.rows}:
            assert self.view.selected == before

    @rule(key=st.sampled_from(
        ("up", "down", "pageup", "pagedown", "home", "end", "left", "right", "r", "o", "x", "k",
         "/", "h", "1", "enter", "escape", "backspace", "?", "wheelup", Click(0, 3), Click(2, 9))
    ))  # fmt: skip
    def press(self, key):
        assert self.view.press(key) is None

    @rule(room=st.integers(-2, 40))
    def set_page_rows(self, room):
        self.view.set_page_rows(room)
        assert self.view.first <= self.view.index < self.view.first + self.view.page_rows
        assert self.view.first <= max(0, len(self.view.rows) - self.view.page_rows)

    @invariant()
    def a_row_is_selected_if_there_is_one(self):
        if hasattr(self, "view") and self.view.rows:
            assert self.view.row.id == self.view.selected


TestView = ViewMachine.TestCase
TestView.settings = settings(max_examples=examples(30), stateful_step_count=20)
