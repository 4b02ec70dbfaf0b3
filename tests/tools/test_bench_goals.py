"""The tables and goals that the bench computes, and its messages where a figure is missing."""

import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tools.bench.data_plane import goals, process_scaling, two_legs
from tools.bench.harness import load_run, peers, proxies, report
from tools.bench.harness.build import build, compiler
from tools.bench.harness.picture import Bar, Group, picture
from tools.bench.memory import connection_memory

needs_cc = pytest.mark.skipif(compiler() is None, reason="no C compiler (cc, gcc or $CC)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def installing(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of an install; the first one creates the programs."""
    steps: list[list[str]] = []

    def step(argv: list[str], wanted: str, advice: str) -> None:
        steps.append(argv)
        if "venv" in argv:
            bin_folder = Path(argv[-1]) / "bin"
            bin_folder.mkdir(parents=True)
            for name in ("python", "smg", "sglang-router", "vllm-router"):
                (bin_folder / name).write_text("#!/bin/sh\n")
                (bin_folder / name).chmod(0o755)

    monkeypatch.setattr(peers, "install_step", step)
    return steps


def leg(side: str, cpu_us: float | None, p50_us: float) -> load_run.Leg:
    return load_run.Leg("unary c=1", side, cpu_us, 15.0, 10, 10.0, 1.0, p50_us, 2.0, 0.0, 0, "")


def round_of(ours: float, peer: float) -> report.Round:
    legs = (leg("bare", None, 50), leg("peer", peer, 50 + peer), leg("ours", ours, 50 + ours))
    return {each.side: each for each in legs}


def test_each_peer_has_its_own_ratio() -> None:
    rounds = [round_of(30, 20) | {"other": leg("other", 100, 1)}]
    rows = report.cpu_table({"unary c=1": rounds}, "ours", ["peer", "other"])
    assert rows[0].split()[-6:] == ["other", "ours", "by", "peer", "by", "other"]
    assert rows[1].split()[-4:] == ["1.50", "(1.50..1.50)", "0.30", "(0.30..0.30)"]


def test_added_latency_is_shown_if_the_worker_was_measured_alone() -> None:
    rounds = [round_of(30, 20), round_of(40, 20)]
    assert report.added_us(rounds, "ours", "bare") == [30, 40]
    rows = report.added_table({"unary c=1": rounds}, ["peer", "ours"], "bare")
    assert rows[1].split() == ["unary", "c=1", "20", "(20..20)", "35", "(30..40)"]
    assert report.added_table({"unary c=1": rounds}, ["ours"], "nobody") == []


def test_a_goal_is_met_by_the_median_and_unknown_without_figures() -> None:
    assert goals.ratio_row("CPU", [1.0, 1.5, 9.0], 1.6).met is True
    assert goals.ratio_row("CPU", [1.7], 1.6).met is False
    assert goals.ratio_row("CPU", [], 1.6).cells() == ["CPU", "-", "<= 1.6", "", "-", ""]


def test_a_part_that_fails_is_reported_and_the_other_parts_run() -> None:
    def fails(how: goals.Measuring, found: goals.Found) -> None:
        raise load_run.LegError("it gave no answer\nand more")

    def succeeds(how: goals.Measuring, found: goals.Found) -> None:
        found.rows.append(goals.Row("w", "9"))

    parts = {"first": fails, "second": succeeds, "last": fails}
    how = goals.Measuring("proxy --port {port}", "proxy", 1, 1.0)
    found = goals.measure_goals(how, parts)
    reason = "not measured: it gave no answer"
    assert [(row.what, row.found) for row in found.rows] == [
        ("first", reason), ("w", "9"), ("last", reason)
    ]  # fmt: skip


def test_the_number_of_connections_is_limited_by_descriptors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert connection_memory.fitting(connection_memory.IDLE, 20_000) is connection_memory.IDLE
    fewer = connection_memory.fitting(connection_memory.SLOW, 1_600)
    assert fewer.load.connections == (1_600 - connection_memory.SPARE_DESCRIPTORS) // 2
    assert "only 500 of 2000 for 'slow stream'" in capsys.readouterr().err
    with pytest.raises(load_run.LegError, match="ulimit -Hn"):
        connection_memory.fitting(connection_memory.IDLE, 500)


def test_bytes_per_connection_are_computed() -> None:
    assert (
        connection_memory.ProcessResources(
            "idle", "proxy", 1_000, 10_000_000, 12_000_000
        ).each_bytes
        == 2_000
    )


@needs_cc
def test_idle_connections_stay_open() -> None:
    with load_run.fake_worker() as ports:
        argv = [str(build("load_generator")), "idle", str(ports[0]), "300", "50", "100"]
        result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0
    assert '"responses": 300' in result.stdout


def test_a_router_gets_its_workers_and_a_metrics_port(
    installing: list[list[str]], tmp_path: Path
) -> None:
    side = proxies.PEERS["smg"]()
    assert side is not None
    assert side.name == f"smg {peers.VERSIONS['smg']}"
    assert side.command is not None
    command = side.command(proxies.Place(7, [8, 9], tmp_path))
    assert command[1:8] == [
        *("launch", "--host", "127.0.0.1", "--port", "7"),
        *("--worker-urls", "http://127.0.0.1:8"),
    ]
    assert int(command[-1]) not in (7, 8, 9)


PEER_MODES = [
    ("sglang-router", "sglang", ["launch", "--pd-disaggregation"], "8998"),
    ("vllm-router", "mooncake", ["--vllm-pd-disaggregation", "--kv-connector", "mooncake"], "8"),
]


@pytest.mark.parametrize(("name", "connector", "mode", "port"), PEER_MODES)
def test_a_router_gets_half_of_the_workers_as_prefill_workers(
    installing: list[list[str]],
    tmp_path: Path,
    name: str,
    connector: str,
    mode: list[str],
    port: str,
) -> None:
    side = two_legs.router_in_two_legs(name, connector)
    assert side.name == f"{name} {peers.VERSIONS[name]} {connector}"
    assert side.command is not None
    command = side.command(proxies.Place(7, [8, 9], tmp_path))
    assert command[1 : 1 + len(mode)] == mode
    at = command.index("--prefill")
    assert command[at : at + 5] == [
        *("--prefill", "http://127.0.0.1:8", port, "--decode", "http://127.0.0.1:9")
    ]


def test_a_router_is_installed_once(
    installing: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = peers.borrowed("smg")
    assert [argv[-1] for argv in installing[1:]] == [f"smg=={peers.VERSIONS['smg']}"]
    assert peers.borrowed("smg") == first
    assert len(installing) == 2
    assert "installing smg" in capsys.readouterr().err


def test_an_interrupted_install_is_repeated(installing: list[list[str]]) -> None:
    program = peers.borrowed("smg")
    (program.parents[1] / "whole").unlink()
    for file in program.parent.iterdir():
        file.unlink()
    program.parent.rmdir()
    assert peers.borrowed("smg").exists()
    assert len(installing) == 4


def test_the_output_of_a_failed_install_step_is_quoted_with_advice(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(peers.NotInstalled, match="smg==1 could not be installed:\n  no such"):
        peers.install_step(
            ["sh", "-c", "echo 'no such package' >&2; exit 1"], "smg==1", "go online"
        )


def test_a_router_over_tls_is_refused() -> None:
    with pytest.raises(proxies.NoTools, match="only without TLS"):
        proxies.PEERS["smg"](secure=True)


def test_a_changed_configuration_keeps_the_rest(tmp_path: Path) -> None:
    side = process_scaling.with_processes(proxies.proxy("proxy --config {config}", "proxy"), 3)
    assert side.command is not None
    side.command(proxies.Place(7, [8], tmp_path))
    text = (tmp_path / proxies.OMNI_FILE).read_text()
    assert text.startswith("[server]\nprocesses = 3\nhost =")
    assert 'url = "http://127.0.0.1:8"' in text
    with pytest.raises(ValueError, match="worker alone has no configuration"):
        proxies.reconfigured(proxies.NOTHING, "x", str)


def test_rates_are_compared_within_a_round() -> None:
    assert process_scaling.ScalingResult(2, [300.0, 100.0], [100.0, 100.0]).ratios == [3.0, 1.0]


def test_the_picture_is_well_formed_and_its_longest_bar_fills_the_width() -> None:
    bars = (Bar("a & b", 50), Bar("ours", 25, "(0.50 x)", ours=True))
    root = ET.fromstring(picture("Cost <here>", "today", [Group("CPU", "us", bars)]))
    rects = root.findall("{http://www.w3.org/2000/svg}rect")
    assert [rect.get("width") for rect in rects] == ["470", "235"]
    assert [rect.get("class") for rect in rects] == ["peer", "ours"]
    texts = [text.text for text in root.findall("{http://www.w3.org/2000/svg}text")]
    assert {"Cost <here>", "a & b", "25.0 us  (0.50 x)"} <= set(texts)
