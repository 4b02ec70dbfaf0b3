"""Workers join the trainer's group, and the proxy beside them keeps a copy for who comes later."""

import pytest
import trio

from tests.promises.sync_program import fleet
from tests.promises.sync_trainer import Trainers, checksum

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")


async def test_a_worker_that_is_restarted_gets_what_the_others_received(tmp_path):
    trainers = Trainers()
    try:
        with trio.fail_after(90), fleet(tmp_path, (), (), mode="both") as running:
            async with running.client() as seen:
                await seen.ready()
                assert (await seen.told("/server_info"))["tp_size"] == 3
                done = await trainers.one().tell(
                    "sync", url=running.url, seed=3, version="v3", form="two-phase"
                )
                assert done["why"] == "", done
                await seen.ready()
                assert set((await seen.digests()).values()) == {checksum(3)}
                (kept,) = (await seen.told("/weights/versions"))["versions"]
                assert (kept["version"], kept["checksum"]) == ("v3", checksum(3))
                victim = running.replicas[0]
                victim.kill()
                await seen.until("/workers", lambda told: told["routable_workers"] == 1)
                victim.start(tmp_path / "again.log")
                await seen.ready()
                assert set((await seen.digests()).values()) == {checksum(3)}
                assert set(await seen.versions()) == {each.url for each in running.replicas}
                assert set((await seen.versions()).values()) == {("v3", 1)}
    finally:
        trainers.close()
