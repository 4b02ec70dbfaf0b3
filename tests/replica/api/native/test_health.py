from tests.replica.api.api_fixture import HEARD, until

HEALTHY = (
    b'{"status":"healthy","running":true,"stages":["play"],"entry_stage":"play",'
    b'"total_requests":0,"pending_completions":0,"request_states":{},"stream_delivery":'
    b'{"stream_backlog_bytes":0,"open_stream_count":0,"generation_finished_stream_count":0,'
    b'"longest_reader_idle_s":0.0,"failed_stream_count":0}}'
)


async def test_health_is_byte_for_byte_the_contracts(world):
    answer = await world.get("/health")
    assert answer.status_code == 200
    assert await answer.get_data() == HEALTHY


async def test_the_instance_is_the_same_for_one_app_and_another_for_the_next(world):
    first, again = [(await world.get("/health")).headers["x-omni-instance"] for _ in range(2)]
    other = (await world.with_options().get("/health")).headers["x-omni-instance"]
    assert first == again != other


async def test_a_server_that_warms_up_is_starting_and_503(world):
    ready = []
    warming = world.with_options(ready=lambda: bool(ready))
    answer = await warming.get("/health")
    assert (answer.status_code, (await answer.get_json())["status"]) == (503, "starting")
    ready.append(True)
    assert (await warming.get("/health")).status_code == 200


async def test_a_stopped_pipeline_is_unhealthy_and_503(world):
    world.client._coordinator.stop()
    answer = await world.get("/health")
    body = await answer.get_json()
    assert (answer.status_code, body["status"], body["running"]) == (503, "unhealthy", False)


async def test_there_is_one_model_with_the_served_name(world):
    assert await (await world.get("/v1/models")).get_data() == (
        b'{"object":"list","data":[{"id":"fake","object":"model","created":0,'
        b'"owned_by":"sglang-omni","permission":[{"id":"modelperm-default",'
        b'"object":"model_permission","allow_create_engine":false,"allow_sampling":true,'
        b'"allow_logprobs":true}],"root":"fake"}]}'
    )


async def test_the_icon_is_a_bare_404(world):
    answer = await world.get("/favicon.ico")
    assert (answer.status_code, await answer.get_data()) == (404, b"")


async def test_health_generate_generates_one_token(tiny):
    answer = await tiny.get("/health_generate")
    assert (answer.status_code, await answer.get_data()) == (200, b"")
    await until(lambda: tiny.client.stats()["decode"]["generation_tokens_total"] == 1)


async def test_health_generate_is_a_503_where_generation_fails(world):
    HEARD.requests.clear()
    world.client._coordinator.stop()
    answer = await world.get("/health_generate")
    assert answer.status_code == 503
    assert "unhealthy" in (await answer.get_json())["detail"]
    assert HEARD.requests == []


async def test_health_generate_does_not_generate_where_nothing_chats(world):
    HEARD.requests.clear()
    speaking = world.with_options(capabilities=frozenset(("speech",)))
    assert (await speaking.get("/health_generate")).status_code == 200
    assert HEARD.requests == []


async def test_the_models_card_can_be_had_by_its_name(world):
    listed = await (await world.get("/v1/models")).get_json()
    answer = await world.get("/v1/models/fake")
    assert (answer.status_code, await answer.get_json()) == (200, listed["data"][0])
    slashed = world.with_options(model_name="org/fake")
    assert (await (await slashed.get("/v1/models/org/fake")).get_json())["id"] == "org/fake"


async def test_another_models_card_is_a_404_of_openais_shape(world):
    answer = await world.get("/v1/models/gpt-4o")
    error = (await answer.get_json())["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'gpt-4o' does not exist" in error["message"]
    assert "'fake'" in error["message"]
