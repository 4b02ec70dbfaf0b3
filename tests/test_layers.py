import subprocess
import sys

import pytest

from tests.tree import PACKAGE, ROOT, imports, name_of, sources

PURE = ("config", "wire", "fleet", "routing", "control")
IMPURE = {"trio", "quart", "quart_trio", "hypercorn", "httpx", "torch", "time", "random", "socket"}
# Who stands below whom. Rooms of one floor may use each other where they don't go in circles.
FLOOR = {
    "itself": -1, "contained": -1, "watchdog": -1, "origins": -1,
    "config": 0, "wire": 0, "collective": 0, "fleet": 1, "routing": 2, "control": 3,
    "door": 4, "doors": 4, "watch": 4, "weights": 4, "front": 4, "observe": 4, "supervise": 4,
    "root": 5, "cli": 6, "__main__": 7,
}  # fmt: skip

SHARED = {name for name, floor in FLOOR.items() if floor < 0}  # by the proxy and the replica


def room(module: str) -> str:
    """`fleet` for omni_proxy.fleet.worker, "" for the package itself."""
    return module.split(".")[1] if module.count(".") else ""


def used_rooms(path) -> set[str]:
    own = (used for used in imports(path) if used.startswith("omni_proxy."))
    # `from omni_proxy import __version__` names no room.
    return {room(used) for used in own} - {"__version__"}


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_go_down_only(path):
    mine = room(name_of(path))
    if mine in FLOOR:
        for other in used_rooms(path) - {mine, "replica"}:
            assert FLOOR[other] < FLOOR[mine] or FLOOR[other] == FLOOR[mine] == 4, other


def test_rooms_of_the_lowest_floor_know_nothing_of_each_other():
    lowest = {name for name, floor in FLOOR.items() if floor == 0}
    for name in lowest:
        others = lowest - {name}
        assert not [p for p in sources(PACKAGE / name) if others & used_rooms(p)]


def test_rooms_of_one_floor_never_go_in_circles():
    uses = {
        name: set().union(*(used_rooms(path) for path in sources(PACKAGE / name))) - {name}
        for name in FLOOR
        if (PACKAGE / name).is_dir()
    }
    while uses:
        free = [name for name, used in uses.items() if not used & uses.keys()]
        assert free, f"a circle: {uses}"
        for name in free:
            del uses[name]


@pytest.mark.parametrize(
    "path",
    [path for name in PURE for path in sources(PACKAGE / name)],
    ids=name_of,
)
def test_a_pure_room_does_nothing_and_knows_no_time(path):
    assert {used.split(".")[0] for used in imports(path)} & IMPURE == set()


def test_the_replica_and_the_proxy_know_nothing_of_each_other():
    for path in sources():
        mine = room(name_of(path))
        if mine == "replica":
            assert used_rooms(path) <= {"replica", "weights", "collective", *SHARED}, path
            shared = {used for used in imports(path) if used.startswith("omni_proxy.weights.")}
            assert all(used.startswith("omni_proxy.weights.checksum") for used in shared), path
        elif mine != "cli":  # where the command is dispatched
            assert "replica" not in used_rooms(path), path


def test_starting_the_proxy_never_imports_torch_or_a_model_runtime():
    code = (
        "import sys, omni_proxy.cli.serve, omni_proxy.root, omni_proxy.collective.group; "
        "print(*sorted({'torch', 'xllamacpp', 'numpy', 'openai'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_every_room_is_on_a_floor():
    here = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("__pycache__")}
    assert here - {"py", "__init__", "replica"} <= FLOOR.keys()
