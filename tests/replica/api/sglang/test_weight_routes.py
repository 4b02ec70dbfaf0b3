import base64
import threading

import pytest
import torch
import trio
from safetensors.torch import save, save_file

from omni_proxy.process_group.broadcast.tensor_hashing import roll_up, tensor_digest
from omni_proxy.replica.models import tiny as tiny_model
from omni_proxy.replica.weights import checker
from tests.replica.api.api_fixture import MESSAGES

KEY = "sesame"
DISK, CHECK, BY_NAME = "/update_weights_from_disk", "/weights_checker", "/get_weights_by_name"
DISTRIBUTED, TENSOR = "/update_weights_from_distributed", "/update_weights_from_tensor"
LAST_NORM = "model.norm.weight"
ROUTES = (
    DISK, TENSOR, DISTRIBUTED, CHECK, BY_NAME, "/init_weights_update_group",
    "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update",
    "/update_weight_version",
)  # fmt: skip


def weights_of(seed):
    return {
        name: tensor.detach().clone() for name, tensor in tiny_model.build(seed).named_parameters()
    }


def checksum_of(tensors):
    return roll_up(
        {
            name: tensor_digest(name, str(tensor.dtype), tensor.shape, tensor.numpy().tobytes())
            for name, tensor in tensors.items()
        }
    )


async def status_and_body(response):
    return response.status_code, await response.get_json()


async def checksum(api):
    status, body = await status_and_body(await api.get(CHECK))
    assert status == 200, body
    return decode_of(body)["data"]["per_gpu_checksum"]


def decode_of(aggregate):
    return next(result for result in aggregate["results"] if result["stage"] == "decode")


async def generate(api):
    sampling = {"temperature": 0, "max_new_tokens": 12}
    request = {"prompt": "The sea", "sampling_params": sampling, "return_logprob": False}
    status, body = await status_and_body(await api.post("/generate", request))
    assert status == 200, body
    return body["text"], body["meta_info"]["weight_version"]


# A complete update


async def test_new_weights_change_every_response_and_old_weights_restore_them(tiny, tmp_path):
    save_file(weights_of(0), tmp_path / "old.safetensors")
    save_file(weights_of(1), tmp_path / "new.safetensors")
    chat_body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    first_chat = await (await tiny.post("/v1/chat/completions", chat_body)).get_json()
    text, version = await generate(tiny)
    assert version == "default"
    assert await checksum(tiny) == checksum_of(weights_of(0))

    new = {"model_path": str(tmp_path / "new.safetensors"), "weight_version": "v1"}
    status, body = await status_and_body(await tiny.post(DISK, new))
    assert (status, body["success"], body["message"]) == (200, True, "ok")
    assert list(body)[:5] == ["op_id", "action", "success", "message", "results"]
    assert (body["status"], body["num_paused_requests"]) == ("ok", 0)
    assert decode_of(body)["message"] == "Succeeded to update model weights."
    assert await checksum(tiny) == checksum_of(weights_of(1))
    changed_text, version = await generate(tiny)
    assert (changed_text != text, version) == (True, "v1")
    changed_chat = await (await tiny.post("/v1/chat/completions", chat_body)).get_json()
    assert changed_chat["choices"][0]["message"] != first_chat["choices"][0]["message"]
    facts = await (await tiny.get("/model_info")).get_json()
    assert (facts["weight_version"], facts["model_path"]) == ("v1", new["model_path"])

    old = {"model_path": str(tmp_path / "old.safetensors"), "weight_version": "v0"}
    assert (await tiny.post(DISK, old)).status_code == 200
    assert await checksum(tiny) == checksum_of(weights_of(0))
    assert await generate(tiny) == (text, "v0")
    restored_chat = await (await tiny.post("/v1/chat/completions", chat_body)).get_json()
    assert restored_chat["choices"][0]["message"] == first_chat["choices"][0]["message"]


async def test_hashing_weights_delays_requests_but_not_health(tiny, monkeypatch):
    started, resume = threading.Event(), threading.Event()
    order = []

    def blocking_digest(*tensor):
        started.set()
        assert resume.wait(20)
        return tensor_digest(*tensor)

    async def hash_all():
        assert await checksum(tiny) == checksum_of(weights_of(0))
        order.append("hashed")

    async def send_request():
        await generate(tiny)
        order.append("generated")

    monkeypatch.setattr(checker, "tensor_digest", blocking_digest)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hash_all)
            await trio.to_thread.run_sync(started.wait, 10)
            nursery.start_soon(send_request)
            for _ in range(3):
                assert (await tiny.get("/health")).status_code == 200
            order.append("healthy")
            resume.set()
    assert order[0] == "healthy"
    assert sorted(order[1:]) == ["generated", "hashed"]


# Forwarded requests


async def test_defaults_are_forwarded_and_null_fields_are_not(tiny, monkeypatch):
    calls = []

    async def admin(action, payload, stages, timeout_s):
        calls.append((action, payload, stages, timeout_s))
        return {"success": True, "results": []}

    monkeypatch.setattr(tiny.client, "admin", admin)
    body = {"model_path": "/m", "load_format": None, "stages": ["decode"], "timeout_s": 0}
    await tiny.post(DISK, body)
    await tiny.post(DISK, {"model_path": "/m", "manifest": {"files": ["a"]}})
    defaults = {
        "model_path": "/m",
        "abort_all_requests": False,
        "is_async": False,
        "torch_empty_cache": False,
        "keep_pause": False,
        "recapture_cuda_graph": False,
        "token_step": 0,
        "flush_cache": True,
    }
    assert calls == [
        ("update_weights_from_disk", defaults, ["decode"], 0),
        ("update_weights_from_disk", defaults | {"manifest": {"files": ["a"]}}, None, 120),
    ]
    calls.clear()
    await tiny.post("/read_weights_ahead", {"model_path": "/m", "nbytes": 7})
    assert calls == [("read_weights_ahead", {"model_path": "/m", "nbytes": 7}, None, 120)]
    calls.clear()
    await tiny.post("/init_weights_update_group", {
        "master_address": "h", "master_port": "29500", "world_size": 3,
    })  # fmt: skip
    await tiny.post("/destroy_weights_update_group", {})
    await tiny.post(DISTRIBUTED, {"names": [], "dtypes": [], "shapes": [], "keep_pause": True})
    await tiny.post("/end_weight_update", b"")
    await tiny.get(f"{CHECK}?action=snapshot")
    group = {"group_name": "weight_update_group"}
    rendezvous = {"master_address": "h", "master_port": 29500, "world_size": 3, "rank_offset": 0}
    announced = {
        "names": [], "dtypes": [], "shapes": [], "flush_cache": True, "abort_all_requests": False,
        "torch_empty_cache": False,
    }  # fmt: skip
    assert calls == [
        ("init_weights_update_group", rendezvous | group, None, 3630),
        ("destroy_weights_update_group", group, None, 300),
        ("update_weights_from_distributed", announced | group, None, 3630),
        ("end_weight_update", {}, None, 120),
        ("weights_checker", {"action": "snapshot"}, None, 120),
    ]


# Invalid requests


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (DISK, {}, "model_path"),
        (DISK, {"model_path": 3}, "model_path"),
        (DISK, {"model_path": "/m", "manifest": ["a"]}, "manifest"),
        (DISTRIBUTED, {"names": ["a"], "dtypes": ["float32"]}, "shapes"),
        (DISTRIBUTED, {"names": ["a"], "dtypes": ["float32"], "shapes": [[1.5]]}, "shapes"),
        (DISTRIBUTED, {"names": "a", "dtypes": ["float32"], "shapes": [[1]]}, "names"),
        ("/init_weights_update_group", {"master_address": "h", "world_size": 2}, "master_port"),
        ("/update_weight_version", {}, "new_version"),
        (BY_NAME, {"name": "a", "truncate_size": -1}, "truncate_size"),
    ],
)
async def test_a_body_of_the_wrong_type_is_a_422_with_the_location(tiny, path, body, field):
    status, reply = await status_and_body(await tiny.post(path, body))
    assert status == 422
    assert field in reply["detail"][0]["loc"]


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
async def test_a_number_that_is_not_finite_is_a_422(tiny, number):
    body = b'{"names":["a"],"dtypes":["float32"],"shapes":[[' + number + b"]]}"
    status, reply = await status_and_body(await tiny.post(DISTRIBUTED, body))
    assert (status, reply["detail"][0]["type"]) == (422, "json_invalid")


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (DISK, {"model_path": "/nothing/here"}, "does not exist"),
        (DISK, {"model_path": "/m", "manifest": {"flies": []}}, "unknown field `flies`"),
        (DISTRIBUTED, {"names": ["a"], "dtypes": [], "shapes": []}, "must have the same length"),
        (DISTRIBUTED, {"names": ["a"], "dtypes": ["float32"], "shapes": [[10**30]]}, "larger than"),
        (CHECK, {"action": "x"}, "Unsupported weights_checker action 'x'"),
        (CHECK, {"action": "compare"}, "requires snapshot first"),
        ("/end_weight_update", {}, "no weight-update session is open"),
        ("/destroy_weights_update_group", {}, "The group to be destroyed does not exist."),
    ],
)
async def test_a_request_that_a_stage_refuses_is_a_400_and_changes_nothing(
    tiny, path, body, reason
):
    before = await checksum(tiny)
    status, reply = await status_and_body(await tiny.post(path, body))
    assert status == 400
    assert reply["detail"]["success"] is False
    assert reason in reply["detail"]["message"]
    assert await checksum(tiny) == before
    facts = await (await tiny.get("/model_info")).get_json()
    assert facts["weight_version"] == "default"
    # Only an update that a trainer has announced leaves the engine paused.
    assert decode_of(facts)["data"]["engine_paused"] is (path == DISTRIBUTED)


async def test_a_body_over_64_mib_is_a_413(tiny):
    names = b'{"names":["' + b"a" * 64 * 2**20 + b'"],"dtypes":[],"shapes":[]}'
    status, body = await status_and_body(await tiny.post(DISTRIBUTED, names))
    top_level = {"success": False, "message": "Request body too large", "status": "error"}
    assert (status, body) == (413, {"detail": "Request body too large", **top_level})
    # A body just below the limit is read, and refused for its content.
    below = b'{"names":["' + b"a" * (64 * 2**20 - 60) + b'"],"dtypes":[],"shapes":[]}'
    status, body = await status_and_body(await tiny.post(DISTRIBUTED, below))
    assert status == 400
    assert "must have the same length" in body["detail"]["message"]


async def test_an_update_of_a_pipeline_without_weights_is_a_400(api):
    for path in (DISK, DISTRIBUTED):
        body = {"model_path": "/m", "names": [], "dtypes": [], "shapes": []}
        status, reply = await status_and_body(await api.post(path, body))
        assert status == 400
        assert reply["detail"]["results"][0]["data"]["skipped"] is True
    assert (await api.get(CHECK)).status_code == 200
    status, reply = await status_and_body(await api.get(f"{BY_NAME}?name=a"))
    assert (status, reply) == (
        400,
        {"error": {"message": "no stage of this pipeline has weights"}},
    )


# The key


@pytest.mark.parametrize("path", ROUTES)
async def test_the_key_is_checked_before_everything_except_invalid_json(tiny, path):
    locked = tiny.with_options(admin_api_key=KEY)
    wrong = {"headers": {"authorization": "Bearer other"}}
    for body in ({}, {"stages": "x"}, b""):
        response = await locked.post(path, body)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert (await locked.post(path, body, **wrong)).status_code == 403
    if path != TENSOR:  # it does not read its body
        assert (await locked.post(path, b"{")).status_code == 422


async def test_reading_checksums_and_tensors_needs_the_key_too(tiny):
    locked = tiny.with_options(admin_api_key=KEY)
    right = {"headers": {"authorization": f"Bearer {KEY}"}}
    for path in (f"{CHECK}?action=checksum", f"{BY_NAME}?name={LAST_NORM}"):
        assert (await locked.get(path)).status_code == 401
        assert (await locked.get(path, **right)).status_code == 200


# Tensors in a request


async def test_tensors_in_a_request_are_a_501_unless_enabled(tiny):
    for body in ({}, b"", b"{", {"serialized_named_tensors": []}):
        status, reply = await status_and_body(await tiny.post(TENSOR, body))
        assert (status, reply["success"], reply["status"]) == (501, False, "error")
        assert reply["error"] == {
            "message": "update_weights_from_tensor is not yet implemented. Use "
            "update_weights_from_disk for the disk-based weight update path.",
            "code": "not_implemented",
        }

    offered = tiny.with_options(enable_tensor_updates=True)
    new = {LAST_NORM: torch.full((128,), 2.0)}
    parts = [base64.b64encode(save(new)).decode()]
    body = {"serialized_named_tensors": parts, "weight_version": "v1"}
    assert (await offered.post(TENSOR, body)).status_code == 200
    assert await checksum(tiny) == checksum_of(weights_of(0) | new)
    assert (await generate(tiny))[1] == "v1"
    assert (await offered.post(TENSOR, {})).status_code == 422
    pickled = {"serialized_named_tensors": [base64.b64encode(b"\x80\x04}.").decode()]}
    status, reply = await status_and_body(await offered.post(TENSOR, pickled))
    assert status == 400
    assert "is a pickle, which is never read" in reply["detail"]["message"]


# Open updates, versions, and tensors by name


async def test_an_open_weight_update_over_http(tiny):
    offered = tiny.with_options(enable_tensor_updates=True)
    before = await checksum(tiny)
    assert (await tiny.post("/begin_weight_update", b"")).status_code == 200
    assert (await tiny.post("/begin_weight_update", {"selector": "all"})).status_code == 400
    new = {LAST_NORM: torch.full((128,), 2.0)}
    parts = [base64.b64encode(save(new)).decode()]
    assert (await offered.post(TENSOR, {"serialized_named_tensors": parts})).status_code == 200
    assert await checksum(tiny) == before
    assert (await tiny.post("/end_weight_update", {})).status_code == 200
    assert await checksum(tiny) == checksum_of(weights_of(0) | new)


async def test_the_weight_version_can_be_set(tiny):
    request = {"new_version": "v5", "abort_all_requests": False}
    status, body = await status_and_body(await tiny.post("/update_weight_version", request))
    assert (status, body["success"], body["new_version"]) == (200, True, "v5")
    assert (await generate(tiny))[1] == "v5"


async def test_a_tensor_is_read_by_its_name_as_an_array(tiny):
    norm = weights_of(0)[LAST_NORM]
    for response in (
        await tiny.get(f"{BY_NAME}?name={LAST_NORM}&truncate_size=3"),
        await tiny.post(BY_NAME, {"name": LAST_NORM, "truncate_size": 3}),
        await tiny.call("GET", BY_NAME, b'{"name": "model.norm.weight", "truncate_size": 3}'),
    ):
        assert await status_and_body(response) == (200, norm[:3].tolist())
    status, body = await status_and_body(await tiny.get(f"{BY_NAME}?name=x"))
    assert (status, body) == (400, {"error": {"message": "the model has no tensor 'x'"}})


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (DISK, {}, "body.model_path: Field required"),
        (DISK, {"model_path": "/nowhere"}, "'/nowhere' does not exist"),
        ("/pause_generation", {"mode": "x"}, "invalid pause mode: x"),
        ("/pause_generation", {"stages": ["x"]}, "x"),
        ("/destroy_weights_update_group", {}, "The group to be destroyed does not exist."),
    ],
)
async def test_a_refusals_message_has_its_reason(tiny, path, body, reason):
    _, reply = await status_and_body(await tiny.post(path, body))
    assert (reply["success"], reply["status"]) == (False, "error")
    assert reason in reply["message"]
    assert "detail" in reply
