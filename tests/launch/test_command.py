import sys

from omni_proxy.config.schema import LaunchEntry
from omni_proxy.launch.replica_process import argv_of, environment_of, start_parameters

ENTRY = LaunchEntry(
    command=("serve", "--at={host}:{port}", '--json={"port": 1, "x": {}}', "{index}/{gpus}"),
    base_port=31000,
    env={"HIP_VISIBLE_DEVICES": "{gpus}", "HOME": "/there"},
    gpus_per_replica=2,
)


def test_placeholders_are_filled_and_other_braces_kept():
    words = ["serve", "--at=127.0.0.1:31003", '--json={"port": 1, "x": {}}', "3/4,5"]
    assert argv_of(ENTRY, 3, ("4", "5")) == words


def test_the_env_of_the_entry_overrides_the_environment():
    env = environment_of(ENTRY, 0, ("4", "5"), {"HOME": "/here", "CUDA_VISIBLE_DEVICES": "0"})
    assert env == {
        "PYTHONUNBUFFERED": "1",
        "HOME": "/there",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "HIP_VISIBLE_DEVICES": "4,5",
    }


def test_without_allocated_gpus_the_visible_ones_are_inherited():
    env = environment_of(LaunchEntry(command=("x",)), 0, (), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_command_omni_proxy_needs_no_path():
    entry = LaunchEntry(command=("omni-proxy", "replica"))
    assert argv_of(entry, 0, ()) == [sys.executable, "-m", "omni_proxy", "replica"]


def test_a_frozen_binary_runs_itself(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    entry = LaunchEntry(command=("omni-proxy", "replica"))
    assert argv_of(entry, 0, ()) == [sys.executable, "replica"]


def test_an_archive_runs_itself(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["./omni-proxy.pyz", "--config", "x"])
    argv = argv_of(LaunchEntry(command=("omni-proxy", "replica")), 0, ())
    assert argv == [sys.executable, f"{tmp_path}/omni-proxy.pyz", "replica"]


def test_the_libraries_of_a_frozen_binary_are_not_inherited_by_other_programs(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    unpacked = {"LD_LIBRARY_PATH": "/tmp/_MEI1", "_PYI_ARCHIVE_FILE": "/bin/omni-proxy"}
    env = {"HOME": "/here", **unpacked}
    other, own = LaunchEntry(command=("vllm",)), LaunchEntry(command=("omni-proxy", "replica"))
    assert environment_of(other, 0, (), env) == {"PYTHONUNBUFFERED": "1", "HOME": "/here"}
    assert environment_of(own, 0, (), env) == {"PYTHONUNBUFFERED": "1", **env}
    before = {**env, "LD_LIBRARY_PATH_ORIG": "/opt/cuda"}
    assert environment_of(other, 0, (), before)["LD_LIBRARY_PATH"] == "/opt/cuda"
    monkeypatch.setattr(sys, "frozen", False)
    assert environment_of(other, 0, (), env)["LD_LIBRARY_PATH"] == "/tmp/_MEI1"


def test_keys_that_apply_to_a_running_process_are_not_start_parameters():
    same = LaunchEntry(command=("x",), replicas=5, model="m", restart="never")
    assert start_parameters(same) == start_parameters(LaunchEntry(command=("x",)))
    assert start_parameters(same) != start_parameters(LaunchEntry(command=("x",), base_port=32000))
    role = LaunchEntry(command=("x",), role="prefill", kv_connector="nixl")
    assert start_parameters(same) == start_parameters(role)
    moved = LaunchEntry(command=("x",), base_bootstrap_port=9000)
    assert start_parameters(same) != start_parameters(moved)


def test_each_replica_has_its_own_bootstrap_port():
    entry = LaunchEntry(command=("x", "{bootstrap_port}"), base_bootstrap_port=9000, replicas=2)
    assert [argv_of(entry, index, ()) for index in (0, 1)] == [["x", "9000"], ["x", "9001"]]


def test_a_number_placeholder_is_incremented_for_each_replica():
    words = ("x", "tcp://*:{5557+index}", '{"a": "tcp://*:{6000+index}", "b": {}}', "{a+index}")
    entry = LaunchEntry(command=words, replicas=3)
    assert argv_of(entry, 0, ())[1] == "tcp://*:5557"
    assert argv_of(entry, 2, ())[1:] == [
        "tcp://*:5559", '{"a": "tcp://*:6002", "b": {}}', "{a+index}",
    ]  # fmt: skip
