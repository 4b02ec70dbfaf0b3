from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.fleet.health_state import Health, Thresholds
from omni_proxy.fleet.registry import CANDIDATE_LISTS, Fleet
from omni_proxy.fleet.worker import capability_mask
from tests.fleet.entries import NOW, entry, fleet_of

names = st.sampled_from("abcde")
models = st.sampled_from([None, "m", "n"])
capability_sets = st.sets(st.sampled_from(CAPABILITIES[:3]), min_size=1).map(frozenset)
entries = st.builds(
    entry, names, model=models, capabilities=capability_sets, disabled=st.booleans(),
    max_inflight=st.integers(0, 2), role=st.sampled_from(["", "", "prefill", "decode"]),
)  # fmt: skip
fleets = st.lists(entries, max_size=5, unique_by=lambda spec: spec.url)


class FleetLife(RuleBasedStateMachine):
    """Compares the fleet with plain dicts that are searched completely each time."""

    @initialize()
    def begin(self):
        self.fleet = Fleet()
        self.fleet.thresholds = Thresholds(rise=1, fall=1, on_threshold=Health.UNHEALTHY)
        self.entries = {}
        self.health = {}
        self.cordon_reasons = {}
        self.objects = {}
        self.tripped = set()  # URLs of ejected workers whose breaker is not closed yet
        self.half_open = {}  # the id of the half-open request in flight, by URL
        self.notified = 0  # calls of the watcher
        self.fleet.watch(self.receive)
        self.reported_roles = {}  # by URL

    def receive(self):
        self.notified += 1

    def draw_worker(self, data):
        return data.draw(st.sampled_from(self.fleet.workers))

    has_workers = precondition(lambda self: self.entries)

    @rule(wanted=fleets)
    def the_configuration_changes(self, wanted):
        before = self.entries
        after = {spec.url: spec for spec in wanted}
        revision, notified = self.fleet.revision, self.notified
        change = self.fleet.apply(wanted, NOW)
        assert [w.url for w in change.added] == [url for url in after if url not in before]
        assert [w.url for w in change.removed] == [url for url in before if url not in after]
        assert [w.url for w in change.changed] == [
            url for url in after if url in before and before[url] != after[url]
        ]
        moved = list(before.items()) != list(after.items())
        assert (self.fleet.revision, self.notified) == (revision + moved, notified + moved)
        self.entries = after
        self.health = {url: self.health.get(url, Health.UNKNOWN) for url in after}
        self.cordon_reasons = {url: self.cordon_reasons.get(url, set()) for url in after}
        self.tripped &= after.keys()
        self.reported_roles = {
            url: role for url, role in self.reported_roles.items() if url in after
        }
        self.settle()

    def settle(self):
        """Only a healthy worker with a tripped breaker has a half-open request."""
        recovering = {url for url in self.tripped if self.health[url] is Health.HEALTHY}
        self.half_open = {
            url: number for url, number in self.half_open.items() if url in recovering
        }

    @has_workers
    @rule(data=st.data(), good=st.booleans())
    def a_probe_ends(self, data, good):
        worker = self.draw_worker(data)
        error = None if good else "refused"
        self.fleet.observe_probe(
            worker, status=None, error=error, at=NOW, epoch=worker.health.epoch
        )
        if self.health[worker.url] is not Health.DEAD:
            self.health[worker.url] = Health.HEALTHY if good else Health.UNHEALTHY
        self.settle()

    @has_workers
    @rule(data=st.data())
    def a_request_fails(self, data):
        worker = self.draw_worker(data)
        half_open_id = self.half_open.get(worker.url, 0)
        self.fleet.observe_request_failure(
            worker, status=502, error="x", at=NOW, half_open_id=half_open_id
        )
        counts = worker.url not in self.tripped and self.health[worker.url] is not Health.UNHEALTHY
        if self.health[worker.url] is not Health.DEAD and (half_open_id or counts):
            self.health[worker.url] = Health.UNHEALTHY
            self.tripped.add(worker.url)
        self.settle()

    @has_workers
    @rule(data=st.data())
    def a_request_succeeds(self, data):
        worker = self.draw_worker(data)
        half_open_id = self.half_open.get(worker.url, 0)
        self.fleet.observe_success(worker, half_open_id)
        if half_open_id:
            self.tripped.discard(worker.url)
        self.settle()

    @has_workers
    @rule(data=st.data())
    def a_half_open_request_begins(self, data):
        worker = self.draw_worker(data)
        if worker.health.is_half_open and worker.routable:
            self.half_open[worker.url] = self.fleet.begin_half_open(worker)

    @precondition(lambda self: self.half_open)
    @rule(data=st.data())
    def a_half_open_request_ends_without_a_result(self, data):
        url = data.draw(st.sampled_from(sorted(self.half_open)))
        self.fleet.end_half_open(self.fleet.find(url), self.half_open.pop(url))

    @has_workers
    @rule(data=st.data(), good=st.booleans(), age=st.integers(1, 3))
    def a_probe_of_an_older_epoch_ends(self, data, good, age):
        worker = self.draw_worker(data)
        machine = worker.health
        before = machine.consecutive_failures, machine.consecutive_successes, machine.state
        self.fleet.observe_probe(
            worker, status=None, error=None if good else "x", at=NOW, epoch=machine.epoch - age
        )
        after = machine.consecutive_failures, machine.consecutive_successes, machine.state
        assert after == before

    @has_workers
    @rule(data=st.data())
    def an_operator_marks_one_dead(self, data):
        worker = self.draw_worker(data)
        self.fleet.mark_dead(worker, NOW)
        self.health[worker.url] = Health.DEAD
        self.settle()

    @has_workers
    @rule(data=st.data())
    def an_operator_revives_one(self, data):
        worker = self.draw_worker(data)
        self.fleet.revive(worker, NOW)
        if self.health[worker.url] is Health.DEAD:
            self.health[worker.url] = Health.UNKNOWN
        self.tripped.discard(worker.url)
        self.settle()

    @has_workers
    @rule(data=st.data())
    def a_process_ends(self, data):
        worker = self.draw_worker(data)
        self.fleet.process_exited(worker, "SIGKILL", NOW)
        if self.health[worker.url] is not Health.DEAD:
            self.health[worker.url] = Health.UNHEALTHY
            self.tripped.discard(worker.url)
        self.settle()

    @has_workers
    @rule(data=st.data(), reason=st.sampled_from(["updating", "launch"]), on=st.booleans())
    def one_is_cordoned_or_uncordoned(self, data, reason, on):
        worker = self.draw_worker(data)
        if on:
            self.fleet.cordon(worker, reason)
            self.cordon_reasons[worker.url].add(reason)
        else:
            self.fleet.uncordon(worker, reason)
            self.cordon_reasons[worker.url].discard(reason)

    @has_workers
    @rule(data=st.data(), role=st.sampled_from(["", "prefill", "decode"]))
    def an_engine_reports_its_role(self, data, role):
        worker = self.draw_worker(data)
        self.fleet.report_role(worker, role)
        self.reported_roles[worker.url] = role

    def role(self, url):
        return self.entries[url].role or self.reported_roles.get(url) or "regular"

    def naive_candidates(self, model, needs, role):
        able = [
            spec
            for url, spec in self.entries.items()
            if self.role(url) == role
            and self.health[url] is Health.HEALTHY
            and not spec.disabled
            and not self.cordon_reasons[url]
            and url not in self.half_open
            and needs <= spec.capabilities
        ]
        if model and any(spec.model for spec in able):
            able = [spec for spec in able if spec.model == model]
        return [spec.url for spec in able]

    @rule(model=st.sampled_from([None, "m", "n", "other"]), needs=capability_sets)
    def candidates_equal_those_of_the_model(self, model, needs):
        mask = capability_mask(needs)
        for _ in range(2):  # the second list comes from the cache
            found = self.fleet.candidates(model, mask)
            assert [w.url for w in found] == self.naive_candidates(model, needs, "regular")
            assert found is self.fleet.pool("regular", model, mask)
            for role in ("prefill", "decode"):
                found = self.fleet.pool(role, model, mask)
                assert [w.url for w in found] == self.naive_candidates(model, needs, role)

    @invariant()
    def workers_are_in_order_and_keep_their_objects(self):
        workers = {worker.url: worker for worker in self.fleet.workers}
        assert list(workers) == list(self.entries)
        for url, worker in workers.items():
            assert self.objects.setdefault(url, worker) is worker
            assert worker.matches(self.entries[url])
            assert self.fleet.get(url) is self.fleet.get(worker.id) is self.fleet.find(url)
        self.objects = workers

    @invariant()
    def counts_equal_those_of_the_states(self):
        counts = self.fleet.count_by_state()
        states = list(self.health.values())
        for state in Health:
            assert counts[f"{state.value}_workers"] == states.count(state)
        assert counts["total_workers"] == len(states)
        assert counts["routable_workers"] == sum(w.routable for w in self.fleet.workers)
        assert self.fleet.has_inflight_limits == any(
            spec.max_inflight for spec in self.entries.values()
        )
        roles = {self.role(url) for url in self.entries}
        assert self.fleet.has_pools == bool(roles - {"regular"})
        assert self.fleet.has_named_models == any(spec.model for spec in self.entries.values())


TestFleetLife = FleetLife.TestCase


def test_the_number_of_candidate_lists_is_bounded():
    fleet = fleet_of(entry("a"))
    for number in range(CANDIDATE_LISTS * 2):
        fleet.candidates(None, number)
    assert fleet.candidate_lists <= CANDIDATE_LISTS


def test_watchers_are_called_once_per_change_of_health():
    fleet = fleet_of(entry("a"), healthy=False)
    states = []
    fleet.watch(lambda: states.append(fleet.workers[0].health.state))
    (worker,) = fleet.workers
    for _ in range(3):
        fleet.observe_probe(worker, status=200, error=None, at=NOW, epoch=worker.health.epoch)
    assert states == [Health.HEALTHY]


def test_a_change_is_reported_for_one_worker_or_for_all_never_both():
    fleet = fleet_of(entry("a"), entry("b"))
    a, b = fleet.workers
    of_all, of_one = [], []
    fleet.watch_members(lambda: of_all.append(len(fleet.workers)))
    fleet.watch_worker(of_one.append)
    fleet.cordon(b, "updating")
    fleet.set_version(a, "v1", 1)
    fleet.mark_dead(a, NOW)
    fleet.uncordon(b, "updating")
    assert (of_all, of_one) == ([], [b, a, a, b])
    fleet.apply([entry("b"), entry("c")], NOW)
    fleet.apply([entry("b", disabled=True), entry("c")], NOW)
    assert (of_all, len(of_one)) == ([2, 2], 4)


def test_a_failed_request_counts_like_a_failed_probe_but_ejects():
    fleet = fleet_of(entry("a"))
    (worker,) = fleet.workers
    for _ in range(fleet.thresholds.fall):
        fleet.observe_request_failure(worker, status=502, error="status=502", at=NOW)
    assert worker.health.state is fleet.thresholds.eject is Health.UNHEALTHY


def test_an_ejection_is_reported_once_and_failed_probes_are_none():
    fleet = fleet_of(entry("a"), entry("b"))
    reported = []
    fleet.watch_ejected(reported.append)
    ejected, probed = fleet.workers
    for _ in range(fleet.thresholds.fall + 2):
        fleet.observe_request_failure(ejected, status=502, error="bad", at=NOW)
        fleet.observe_probe(probed, status=None, error="refused", at=NOW, epoch=0)
    assert reported == [ejected]


def test_cleared_caches_are_reported_on_removal_exit_and_flush():
    fleet = fleet_of(entry("a"), entry("b"), entry("c"))
    a, b, c = fleet.workers
    cleared = []
    fleet.watch_cache_cleared(cleared.append)
    fleet.apply([entry("b"), entry("c", disabled=True)], NOW)
    fleet.process_exited(b, "SIGKILL", NOW)
    fleet.cache_cleared(c)
    assert cleared == [a, b, c]


def test_unknown_models_add_no_candidate_lists():
    for fleet in (fleet_of(entry("a", model="m"), entry("b")), fleet_of(entry("a"), entry("b"))):
        for number in range(100):
            fleet.candidates(f"no such model {number}", 0)
        assert fleet.candidate_lists == 1


def test_the_number_of_candidate_lists_of_pools_is_bounded():
    fleet = fleet_of(entry("a", role="decode"))
    for number in range(CANDIDATE_LISTS * 2):
        fleet.pool("decode", None, number)
    assert fleet.candidate_lists <= CANDIDATE_LISTS


def test_a_configured_role_overrides_the_reported_one():
    fleet = fleet_of(entry("a", role="regular"), entry("b"))
    a, b = fleet.workers
    revision = fleet.revision
    fleet.report_role(a, "prefill")
    assert (a.role, fleet.has_pools, fleet.revision) == ("regular", False, revision)
    fleet.report_role(b, "prefill")
    assert (b.role, fleet.has_pools) == ("prefill", True)
    fleet.apply([entry("a"), entry("b", role="decode")], NOW)
    assert (a.role, b.role) == ("prefill", "decode")
