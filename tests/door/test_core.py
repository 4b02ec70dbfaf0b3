import msgspec

from omni_proxy.config.parse import parse
from omni_proxy.config.schema import Config
from omni_proxy.door.core import Door
from omni_proxy.fleet.registry import Fleet


def config_of(**server) -> Config:
    lines = "\n".join(
        f"{key} = {msgspec.json.encode(value).decode()}" for key, value in server.items()
    )
    return parse(f"[server]\nport = 0\n{lines}\n")


async def test_a_reload_does_not_open_what_a_drain_has_closed(nursery, tmp_path):
    door = Door(Fleet(), config_of(), front_socket=str(tmp_path / "front"), below=lambda _: 0)
    await nursery.start(door.run)
    door.prepare(config_of())()
    assert len(door.addresses()) == 1
    door.begin_drain()
    door.prepare(config_of(host="127.0.0.2"))()
    assert door.addresses() == []
    assert door.config.server.host == "127.0.0.2"
