import io
import re
import signal
import subprocess
import sys

import pytest

import omni_proxy
from omni_proxy import native
from omni_proxy.cli import COMMANDS, INNER, main
from omni_proxy.cli.config_file import check
from omni_proxy.config.schema import Config


@pytest.fixture
def started(monkeypatch):
    """The startups that were passed to `server.run`, which is replaced."""
    calls = []
    stand_in = type(sys)("omni_proxy.server")
    stand_in.run = lambda startup: calls.append(startup) or 7
    monkeypatch.setitem(sys.modules, "omni_proxy.server", stand_in)
    monkeypatch.delenv("SGLANG_OMNI_ADMIN_KEY", raising=False)
    return calls


@pytest.fixture
def refused(capsys):
    """A function that runs a command that must end with status 2, and returns its error output."""

    def run(*args):
        try:
            status = main(args)
        except SystemExit as exited:
            status = exited.code
        assert status == 2
        return capsys.readouterr().err

    return run


def test_an_early_sighup_does_not_end_the_program(started, monkeypatch):
    def run(_):
        signal.raise_signal(signal.SIGHUP)
        return 7

    monkeypatch.setattr(sys.modules["omni_proxy.server"], "run", run)
    before = signal.getsignal(signal.SIGHUP)
    try:
        assert main(["--worker-urls", "http://a:1"]) == 7
    finally:
        signal.signal(signal.SIGHUP, before)


def test_with_workers_on_the_command_line_no_file_is_needed(started):
    args = ["--worker-urls", "HTTP://A/", "http://b:1", "--port", "0", "--policy", "random"]
    assert main(args) == 7
    (startup,) = started
    assert startup.config_path is None
    assert startup.flag_urls == ("http://a", "http://b:1")
    assert startup.overrides == {"server.port": "0", "routing.policy": "random"}
    assert startup.effective_config(Config()).server.port == 0


@pytest.mark.parametrize("command", [[], ["serve"]])
def test_serve_is_the_default_command(started, tmp_path, command):
    file = tmp_path / "proxy.toml"
    file.write_text("server.port = 1")
    assert main([*command, "--config", str(file)]) == 7
    assert started[0].config_path == file


def test_every_flag_sets_its_key(started):
    flags = {
        "--worker-urls": "http://a",
        "--host": "0.0.0.0",
        "--port": "1",
        "--policy": "random",
        "--model": "m",
        "--request-timeout-secs": "2",
        "--max-payload-size": "3MiB",
        "--health-failure-threshold": "4",
        "--health-success-threshold": "5",
        "--health-check-timeout-secs": "6",
        "--health-check-interval-secs": "7",
        "--health-check-endpoint": "/up",
        "--admin-api-key": "k",
        "--log-level": "debug",
    }
    args = [word for flag in flags.items() for word in flag]
    assert main(args) == 7
    config = started[0].effective_config(Config())
    assert (config.server.host, config.server.port) == ("0.0.0.0", 1)
    assert (config.routing.policy, config.routing.model) == ("random", "m")
    assert config.server.request_timeout_secs == 2
    assert config.server.max_payload_size == 3 * 1024**2
    assert (config.health.failure_threshold, config.health.success_threshold) == (4, 5)
    assert (config.health.timeout_secs, config.health.interval_secs) == (6, 7)
    assert config.health.endpoint == "/up"
    assert config.admin.api_key == "k"
    assert config.server.log_level == "debug"


def test_the_admin_key_of_the_environment_is_passed_on(started, monkeypatch):
    monkeypatch.setenv("SGLANG_OMNI_ADMIN_KEY", "hush")
    main(["--worker-urls", "http://a"])
    assert started[0].admin_key == "hush"


@pytest.mark.parametrize(
    "command",
    ["", "check", "completion", "explain", "init", "launch-router", "logs", "schema", "simulate",
     "status", "top", "weights", "workers"],
)  # fmt: skip
def test_a_usage_error_is_short(refused, command):
    lines = refused(*command.split(), "--statu", "x").splitlines()
    name = f"omni-proxy {command}".strip()
    assert lines[0].startswith(f"usage: {name} ")
    assert lines[0].endswith(f"({name} --help)")
    assert lines[1].startswith(f"{name}: error: ")
    assert len(lines) <= 3


def test_a_flag_of_a_subcommand_is_suggested(refused):
    assert "did you mean `--json`?" in refused("workers", "list", "--jsn")


def test_without_a_file_or_workers_serve_is_refused(refused):
    assert "--config FILE" in refused("--port", "1")


@pytest.mark.parametrize("args", [[], ["serve"]])
def test_without_arguments_the_commands_are_listed(refused, args):
    output = refused(*args)
    assert output.startswith("usage: omni-proxy [COMMAND] [FLAGS]\n")
    assert "omni-proxy launch " in output
    assert len(output.splitlines()) < 36


@pytest.mark.parametrize("args", [["--prot", "1"], ["launch-router", "--prot"], ["launch", "--dp"]])
def test_the_error_of_an_unknown_flag_is_short(refused, args):
    lines = refused(*args).splitlines()
    assert lines[0].startswith("usage: omni-proxy ")
    assert len(lines) <= 3


def test_help_begins_with_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    assert output.index("omni-proxy launch-router") < output.index("--worker-urls [URL ...]")


@pytest.mark.parametrize(
    ("args", "suggestion"), [(["workers", "drian", "a"], "drain"), (["weights", "paus"], "pause")]
)
def test_a_similar_subcommand_is_suggested(refused, args, suggestion):
    assert refused(*args).splitlines()[-1] == f"  did you mean `{suggestion}`?"


def test_a_missing_file_is_refused(refused, tmp_path):
    output = refused("--config", str(tmp_path / "none.toml"))
    assert output == f"{tmp_path}/none.toml: cannot be read: No such file or directory\n"


def test_a_folder_as_the_file_is_refused(refused, tmp_path):
    assert "cannot be read: Is a directory" in refused("--config", str(tmp_path))


def test_a_broken_file_is_refused_with_all_its_problems(refused, tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text("server.prot = 1\nserver.port = 'x'\n")
    lines = refused("--config", str(file)).splitlines()
    assert lines == [
        f"{file}:1: server.prot: unknown key; did you mean `port`?",
        f"{file}:2: server.port: expected a whole number, got a string",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--port", "x"], "command line: --port: expected a whole number"),
        (["--polcy", "random"], "unrecognized arguments: --polcy"),
        (["--pol", "random"], "unrecognized arguments: --pol"),
        (["--worker-urls", "h:1"], 'command line: --worker-urls: "h:1": scheme must be'),
        (["serve", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_a_wrong_argument_is_refused(refused, args, message):
    assert message in refused(*args, "--worker-urls", "http://a")


@pytest.mark.parametrize("command", [[], ["serve"], ["check"]])
def test_each_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as exited:
        main([*command, "--help"])
    assert exited.value.code == 0
    output = capsys.readouterr().out
    assert "usage: omni-proxy" in output
    assert command == ["check"] or all(
        word in output for word in ("examples:", "omni-proxy check FILE", "omni-proxy replica")
    )


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"{native.full_version(omni_proxy.__version__)}\n"


def test_the_replica_command_gets_its_arguments(monkeypatch):
    stand_in = type(sys)("omni_proxy.replica.replica_command")
    stand_in.main = lambda args: len(args)
    monkeypatch.setitem(sys.modules, "omni_proxy.replica.replica_command", stand_in)
    assert main(["replica", "--port", "1"]) == 2


def test_the_default_arguments_are_those_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["omni-proxy", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert "omni-proxy" in capsys.readouterr().out


def test_a_closed_pipe_ends_a_command_without_a_traceback():
    argv = [sys.executable, "-m", "omni_proxy", "completion", "bash"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.close()
        output = command.stderr.read()
        assert command.wait(30) == 141
    assert output == b""


def test_closed_standard_streams_are_replaced_with_dev_null():
    program = """
import os, sys
from omni_proxy.cli import main
status = main(["completion", "bash"])
devices = {os.fstat(number).st_rdev for number in range(3)}
os._exit(0 if status == 0 and devices == {os.stat("/dev/null").st_rdev} else 1)
"""
    argv = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", program]
    assert subprocess.run(argv, check=False, timeout=30).returncode == 0


def test_a_closed_stdout_is_not_an_error():
    argv = ["/bin/sh", "-c", 'exec "$@" >&-', "-", sys.executable, "-m", "omni_proxy"]
    result = subprocess.run(
        [*argv, "completion", "bash"], capture_output=True, timeout=30, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_character_outside_the_locale_is_printed_as_a_question_mark(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(check, "main", lambda _: print("ü…\u2603") or 0)
    assert main(["check", "proxy.toml"]) == 0
    assert stdout.buffer.getvalue() == b"\xfc??\n"


# `__complete` is called by shells, and prints nothing if a user calls it.
@pytest.mark.parametrize("word", sorted(INNER.keys() - {"__complete"}))
def test_an_internal_command_explains_itself_to_users(word):
    with pytest.raises(
        SystemExit, match=rf"{word} is (internal: omni-proxy starts|started by omni-proxy)"
    ):
        main([word])


@pytest.mark.parametrize("word", sorted(INNER))
def test_the_help_does_not_list_internal_commands(word, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert word not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("stat", "did you mean status?"),
        ("wokers", "did you mean workers"),
        ("proxy.toml", "--config proxy.toml"),
        ("xyzzy", "commands: bench, check"),
    ],
)
def test_an_unknown_command_is_reported_with_a_hint(refused, word, hint):
    output = refused(word, "--json")
    assert f'unknown command "{word}"' in output
    assert hint in output
    assert len(output.splitlines()) == 1


def test_the_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if not re.search(rf"omni-proxy \[?{name}\b", shown)] == []


@pytest.mark.parametrize("args", [["help"], ["help", "status"], ["help", "weights", "rollback"]])
def test_help_is_a_command_too(capsys, args):
    with pytest.raises(SystemExit) as exited:
        main(args)
    assert exited.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: omni-proxy {' '.join(args[1:])}")


def test_ctrl_c_prints_no_traceback(monkeypatch, capsys):
    class InterruptedStdin:
        buffer = property(lambda self: signal.raise_signal(signal.SIGINT))

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stdin", InterruptedStdin())
    # SIGINT is ignored if a shell started the tests in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["explain", "--url", "http://127.0.0.1:1"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "")
