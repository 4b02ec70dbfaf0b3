import trio

from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from tests.replica.api.api_fixture import opened
from tests.replica.weights.stage_fixture import checksum_of, save, weights_of


async def test_the_ranks_are_seen_over_http_and_follow_an_update_or_refuse_it_together(tmp_path):
    with trio.fail_after(40):
        async with opened(builtin_pipeline(BuiltinOptions(model="tiny", tp=2))) as world:
            facts = await (await world.get("/server_info")).get_json()
            assert facts["tp_size"] == 2
            file = save(tmp_path / "new.safetensors", weights_of(7))
            body = {"model_path": str(file), "weight_version": "v7"}
            answer = await world.post("/update_weights_from_disk", body)
            assert answer.status_code == 200
            info = await (await world.get("/model_info")).get_json()
            assert info["weight_version"] == "v7"
            leader = next(each for each in info["results"] if each["stage"] == "decode")
            assert (leader["rank"], leader["role"], leader["data"]["tp_size"]) == (0, "leader", 2)
            checked = await (await world.get("/weights_checker")).get_json()
            leader = next(each for each in checked["results"] if each["stage"] == "decode")
            assert leader["data"]["full_checksum"] == checksum_of(weights_of(7))
            assert [each["role"] for each in leader["data"]["rank_results"]] == [
                "leader",
                "follower",
            ]

            body = {"model_path": str(tmp_path / "missing")}
            answer = await world.post("/update_weights_from_disk", body)
            assert answer.status_code == 400
            refused = (await answer.get_json())["detail"]["results"]
            leader = next(each for each in refused if each["stage"] == "decode")
            ranks = leader["data"]["rank_results"]
            assert [(each["rank"], each["success"]) for each in ranks] == [(0, False), (1, False)]
            assert "does not exist" in leader["message"]
