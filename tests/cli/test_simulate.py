"""`omni-proxy simulate` as a command."""

import json

import pytest

from omni_proxy.cli import main
from omni_proxy.config.fields import POLICIES


def run(capsys, *args):
    status = main(["simulate", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def simulate(capsys, *args):
    status, out, err = run(capsys, *args, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


SMALL = ("--workload", "shared", "--requests", "60", "--workers", "3")


def test_without_a_configuration_all_policies_are_run_in_order(capsys):
    result = simulate(capsys, *SMALL)
    assert [run["policy"] for run in result["runs"]] == list(POLICIES)
    assert (result["seed"], result["workers"]) == (0, 3)
    assert result["workload"]["requests"] == 60
    for row in result["runs"]:
        assert row["completed"] + row["failed"] == row["requests"] == 60


def test_equal_arguments_give_equal_figures(capsys):
    def figures(*args):
        result = simulate(capsys, *SMALL, *args)
        return {key: value for key, value in result.items() if "wall" not in key}

    assert figures("--policies", "random") == figures("--policies", "random")
    assert figures("--policies", "random") != figures("--policies", "random", "--seed", "1")


def test_policy_workers_and_limits_are_those_of_the_configuration(capsys, tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text(
        '[server]\nmax_inflight = 1\n[routing]\npolicy = "least_request"\n'
        '[[workers]]\nurl = "http://10.0.0.1:1"\n[[workers]]\nurl = "http://10.0.0.2:1"\n'
    )
    result = simulate(capsys, "--workload", "rollouts", "--requests", "20", "--config", str(file))
    assert result["workers"] == 2
    assert [run["policy"] for run in result["runs"]] == ["least_request"]
    assert result["runs"][0]["failed"] == 19  # all arrive at once, and only one may be in flight


def test_swept_values_are_run_with_each_policy(capsys):
    result = simulate(
        capsys, *SMALL, "--policies", "cache_aware,prefix_hash",
        "--sweep", "routing.cache_aware.cache_threshold=0.2,0.9",
        "--sweep", "server.queue_size=0,5",
    )  # fmt: skip
    threshold, queue = "routing.cache_aware.cache_threshold", "server.queue_size"
    assert [
        (run["policy"], run["settings"][threshold], run["settings"][queue])
        for run in result["runs"]
    ] == [
        (policy, share, size)
        for policy in ("cache_aware", "prefix_hash")
        for share in (0.2, 0.9)
        for size in (0, 5)
    ]


def test_the_table_and_the_plot(capsys, tmp_path):
    plot = tmp_path / "policies.svg"
    status, out, _ = run(
        capsys, *SMALL, "--policies", "random,cache_aware", "--plot", str(plot),
        "--deadline-ms", "500", "--fault", "slow:0@1x3",
    )  # fmt: skip
    assert status == 0
    lines = out.splitlines()
    assert "best possible hit rate" in lines[1]
    assert [line.split()[0] for line in lines[-3:]] == ["POLICY", "random", "cache_aware"]
    assert lines[-3].endswith("GOODPUT/s")
    assert ">cache_aware</text>" in plot.read_text()


def test_a_trace_is_replayed(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {number * 1000}, "input_length": 600, "output_length": 5, '
            f'"hash_ids": [0, {number}]}}\n'
            for number in range(1, 5)
        )
    )
    result = simulate(capsys, "--trace", str(trace), "--workers", "1", "--policies", "random")
    assert result["workload"]["best_possible_hit_rate"] == pytest.approx(3 / 8)
    flags = ("--trace", str(trace), "--policies", "random")
    assert "best possible hit rate 37.5 %, of tokens 64.0 %: " in run(capsys, *flags)[1]
    assert result["runs"][0]["hit_rate"] == pytest.approx(3 / 8)


def test_sources_are_swept_with_lost_events(capsys):
    result = simulate(
        capsys, *SMALL, "--policies", "cache_aware", "--fault", "lose_events:0.5",
        "--sweep", "routing.cache_aware.source=inferred,events",
    )  # fmt: skip
    assert [run["completed"] for run in result["runs"]] == [60, 60]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--trace", "missing.jsonl"), "missing.jsonl: No such file"),
        ((*SMALL, "--fault", "die:3@1"), "--fault die:3@1: there are workers 0 to 2"),
        ((*SMALL, "--fault", "burn:3@1"), "expected die:W@SECS"),
        ((*SMALL, "--fault", "lose_events:0.1"), "has no effect: no run reads KV events"),
        ((*SMALL, "--sweep", "routing.nothing=1"), "routing.nothing"),
        ((*SMALL, "--sweep", "routing.policy.x=1"), "not a table of the configuration"),
        ((*SMALL, "--sweep", "x"), "expected KEY=A,B"),
        ((*SMALL, "--policies", "fastest"), "fastest"),
        ((*SMALL, "--policies", ","), "--policies: expected at least one name"),
        ((*SMALL, "--config", "missing.toml"), "missing.toml"),
        ((*SMALL, "--calibrate", "http://127.0.0.1:9"), "http://127.0.0.1:9/v1/models: "),
    ],
)
def test_invalid_input_is_refused_with_its_reason(capsys, args, expected):
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert expected in err


@pytest.mark.parametrize(
    "args", [(), ("--workload", "naps"), (*SMALL, "--workers", "0"), (*SMALL, "--kv-tokens", "-1")]
)
def test_usage_errors(capsys, args):
    with pytest.raises(SystemExit) as exited:
        run(capsys, *args)
    assert exited.value.code == 2


def test_roles_and_ranks_are_refused(capsys, tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text('[[workers]]\nurl = "http://10.0.0.1:1"\nrole = "prefill"\n')
    status, _, err = run(capsys, "--workload", "uniform", "--config", str(file))
    assert status == 2
    assert "not simulated" in err


def test_failures_and_keys_without_effect_are_listed_below_the_table(capsys):
    flags = ("--policies", "random", "--kv-tokens", "1")
    status, out, _ = run(capsys, *SMALL, *flags, "--sweep", "server.port=1,2")
    assert status == 0
    assert "failed: 120 the request is longer than the KV memory" in out
    assert "no figure depends on server.port here" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("random")]
    assert [row[-1] for row in rows] == ["-", "-"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--plot", "/nowhere/at/all.svg"), "there is no directory /nowhere/at"),
        (("--plot", "/"), "--plot /: is a directory"),
        (("--sweep", "routing.policy=random"), "--policies A,B"),
        (("--sweep", "server.port=1", "--sweep", "server.port=2"), "is given twice"),
        (("--policies", "random,foo"), 'defaults with policy foo:2: routing.policy: "foo"'),
    ],
)
def test_invalid_input_is_refused_before_the_simulation(capsys, monkeypatch, flags, reason):
    monkeypatch.setattr("omni_proxy.cli.simulate.Simulation", None)
    status, out, err = run(capsys, *SMALL, *flags)
    assert (status, out) == (2, "")
    assert reason in err
