"""The form of log lines: `event key=value key=value`; details of several lines follow in lines of
their own.

Values have no quotes here and no `%r`: `log_text` quotes them where they need it.
"""

import ast
import re
from collections import defaultdict

import pytest

from tests.tree import ROOT, name_of, nodes, sources

LEVELS = frozenset(("debug", "info", "warning", "error", "exception", "critical"))
VALUE = r"(?:[^\s\"%]|%[sdg]|%\.\df)+"
FORM = re.compile(rf"(?:[a-z][a-z0-9]*_)+(?:[a-z0-9]+|%s)(?: [a-z0-9_.]+={VALUE})*(?:\n%s)?")
# Lines of other programs, and of our other processes, which are in this form already; and the
# watchdog, whose event is a constant.
OTHERS = frozenset((
    "%s", "%s %s", "%s receiver_pid=%s", "%s secs=%.1f stacks_of=all_threads\n%s",
))  # fmt: skip
# The same event is logged in several places.
IN_SEVERAL_FILES = frozenset((
    "certificate_reload_failed", "discovery_failed", "listener_opened", "prefix_trees_left_out",
    "process_group_replaced", "shutdown_aborted", "worker_deleted", "worker_drain_overdue",
    "worker_registered", "worker_remove_failed",
))  # fmt: skip


# For one release, a line of a renamed event has its old name, so that searches find both. Some of the
# old names are still names of other events.
RENAMED = {
    "certificate_reload_failed": "certificates_not_reloaded",
    "cluster_calls_disabled": "cluster_calls_off",
    "cluster_member_removed": "cluster_member_gone",
    "cluster_peer_lease_expired": "cluster_peer_gone",
    "cluster_peer_signed_off": "cluster_peer_left",
    "cluster_workers_deferred": "cluster_workers_wait",
    "grpc_listen_failed": "grpc_listen_refused",
    "kv_events_unavailable": "kv_events_impossible",
    "operation_drain_timeout": "drain_timeout",
    "operation_result_late": "operation_answer_late",
    "prefix_tree_timeout": "prefix_trees_late",
    "replica_connection_failed": "connection_failed",
    "replica_drain_started": "drain_started",
    "replica_drain_timeout": "drain_timeout",
    "rollout_worker_skipped": "rollout_left_out",
    "shutdown_aborted": "second_signal",
    "tp_message_ignored": "tp_answer_ignored",
}


def logs(method) -> bool:
    return (
        isinstance(method, ast.Attribute)
        and method.attr in (*LEVELS, "log")
        and isinstance(method.value, ast.Name)
        and method.value.id in ("_log", "log")
    )


def logged():
    """File, line and text of each log call, also of `partial(_log.info, text)`."""
    for path in sources():
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            if logs(node.func):
                yield path, node.lineno, node.args[1 if node.func.attr == "log" else 0]
            elif node.args and logs(node.args[0]):
                yield path, node.lineno, node.args[1]


def texts():
    for path, line, text in logged():
        assert isinstance(text, ast.Constant), f"{path}:{line}: the text is no literal"
        yield f"{path.relative_to(ROOT)}:{line}", text.value


def test_log_lines_name_an_event_and_its_values():
    by_place = dict(texts())
    assert len(by_place) > 100
    wrong = {
        place: text
        for place, text in by_place.items()
        if text not in OTHERS and not FORM.fullmatch(text)
    }
    assert not wrong


def test_each_exception_is_still_used():
    assert set(dict(texts()).values()) >= OTHERS


def test_an_event_has_one_meaning():
    files = defaultdict(set)
    for path, _, text in logged():
        event = text.value.split(" ", 1)[0].rstrip(":")
        if "%" not in event:
            files[event].add(name_of(path))
    several = {event for event, names in files.items() if len(names) > 1}
    assert several == IN_SEVERAL_FILES


def test_a_renamed_event_has_its_old_name():
    shown = defaultdict(set)
    for text in dict(texts()).values():
        event = text.split(" ", 1)[0]
        if event in RENAMED:
            shown[event].update(re.findall(r" was=(\w+)", text))
    assert shown == {event: {name} for event, name in RENAMED.items()}


@pytest.mark.parametrize(
    "text",
    ["omni-proxy %s starts", "worker is gone", "a: %s", "keys lost", 'a_b error="%s"', "a_b c=%r",
     "a_b %s", "a_b c=%s: kept", "a_b c=%s, kept"],
)  # fmt: skip
def test_a_sentence_does_not_match_the_form(text):
    assert not FORM.fullmatch(text)
