import hashlib
import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from omni_proxy.replica.pipeline.stage_messages import ResultChunk, StageFailure
from tests.replica.weights.stage_fixture import checksum_of, save, weights_of

EMBEDDING, LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"


def test_new_weights_change_the_text_and_the_old_ones_restore_it(stage, tmp_path):
    old, new = weights_of(0), weights_of(1)
    save(tmp_path / "old.safetensors", old)
    save(tmp_path / "new.safetensors", new)
    before = stage.generate()
    assert before["weight_version"] == "default"
    assert stage.checksum() == checksum_of(old)

    result = stage.update(tmp_path / "new.safetensors", weight_version="v1", token_step=7)
    assert (result.success, result.message) == (True, "Succeeded to update model weights.")
    assert result.data == {
        "num_paused_requests": 0,
        "flush_cache": True,
        "flush_success": True,
        "cache_epoch": 1,
        "keep_pause": False,
        "engine_paused": False,
        "model_path": str(tmp_path / "new.safetensors"),
        "weight_version": "v1",
        "token_step": 7,
    }
    assert stage.checksum() == checksum_of(new)
    after = stage.generate()
    assert after["weight_version"] == "v1"
    assert after["text"] != before["text"]

    stage.update("old.safetensors")  # relative to the root; without a version, the label stays
    assert stage.checksum() == checksum_of(old)
    restored = stage.generate()
    assert (restored["text"], restored["weight_version"]) == (before["text"], "v1")


def test_an_update_from_the_name_of_the_model_restores_its_weights(stage, tmp_path):
    save(tmp_path / "new.safetensors", weights_of(1))
    before = stage.generate()
    assert stage.update("new.safetensors", weight_version="v1").success
    result = stage.update("tiny", weight_version="default")
    assert (result.success, result.data["model_path"]) == (True, "tiny")
    assert stage.checksum() == checksum_of(weights_of(0))
    assert stage.generate()["text"] == before["text"]


def test_the_prefix_cache_is_not_used_with_other_weights(stage, tmp_path):
    prompt = list(range(260, 320))
    save(tmp_path / "new.safetensors", weights_of(1))
    stage.generate(prompt=prompt)
    assert stage.generate(prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    result = stage.update("new.safetensors", flush_cache=False)
    assert (result.data["flush_cache"], result.data["flush_success"]) == (False, None)
    assert stage.generate(prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_folder_may_have_several_files_with_or_without_an_index(stage, tmp_path):
    new = weights_of(1)
    names = sorted(new)
    folder = tmp_path / "sharded"
    folder.mkdir()
    save(folder / "one.safetensors", {name: new[name] for name in names[:20]})
    save(folder / "two.safetensors", {name: new[name] for name in names[20:]})
    assert stage.update(folder).success
    assert stage.checksum() == checksum_of(new)

    other = weights_of(2)
    save(folder / "one.safetensors", {name: other[name] for name in names[:20]})
    save(folder / "two.safetensors", {name: other[name] for name in names[20:]})
    save(folder / "stray.safetensors", {"adapter": torch.ones(3)})
    weight_map = {name: f"{'one' if name in names[:20] else 'two'}.safetensors" for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert stage.update("sharded").success
    assert stage.checksum() == checksum_of(other)


def test_the_tied_head_may_use_its_alias_but_not_other_values(stage, tmp_path):
    new = weights_of(1)
    alias = {("lm_head.weight" if k == EMBEDDING else k): v for k, v in new.items()}
    save(tmp_path / "alias.safetensors", alias)
    assert stage.update("alias.safetensors").success
    assert stage.checksum() == checksum_of(new)
    both = new | {"lm_head.weight": new[EMBEDDING].clone()}
    save(tmp_path / "both.safetensors", both)
    assert stage.update("both.safetensors").success
    save(tmp_path / "odd.safetensors", both | {"lm_head.weight": new[EMBEDDING] + 1})
    result = stage.update("odd.safetensors")
    assert not result.success
    assert "occurs twice, with different values" in result.message


def test_half_precision_is_converted_to_the_dtype_of_the_model(stage, tmp_path):
    save(tmp_path / "half.safetensors", weights_of(1, torch.bfloat16))
    assert stage.update("half.safetensors").success
    rounded = {name: tensor.float() for name, tensor in weights_of(1, torch.bfloat16).items()}
    assert stage.checksum() == checksum_of(rounded)


def test_a_manifest_changes_only_the_tensors_and_files_that_it_names(stage, tmp_path):
    old, new = weights_of(0), weights_of(1)
    save(tmp_path / "all.safetensors", new)
    save(tmp_path / "norm.safetensors", {LAST_NORM: new[LAST_NORM] * 2})
    tensors = {"model.layers.0.mlp.up_proj.weight": "all.safetensors"}
    result = stage.update(tmp_path, manifest={"tensors": tensors})
    assert result.success, result.message
    expected = old | {name: new[name] for name in tensors}
    assert stage.checksum() == checksum_of(expected)

    sha256 = hashlib.sha256((tmp_path / "norm.safetensors").read_bytes()).hexdigest()
    files = [{"path": "norm.safetensors", "sha256": sha256.upper()}]
    assert stage.update(tmp_path, manifest={"files": files}).success
    expected |= {LAST_NORM: new[LAST_NORM] * 2}
    assert stage.checksum() == checksum_of(expected)
    files[0]["sha256"] = "0" * 64
    result = stage.update(tmp_path, manifest={"files": files})
    assert not result.success
    assert sha256 in result.message


def corrupted(tmp_path, change):
    """A complete file of new weights whose bytes were changed by `change`."""
    path = save(tmp_path / "weights.safetensors", weights_of(1))
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))
    return path


def header_of(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def with_changed_tensors(tmp_path, **changed):
    tensors = weights_of(1)
    for name, tensor in changed.items():
        tensors[name.replace("__", ".")] = tensor
    return save(tmp_path / "weights.safetensors", tensors)


def a_folder_without_weights(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    return "empty"


def a_shard_that_is_missing(tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    save(folder / "one.safetensors", weights_of(1))
    index = {"weight_map": {LAST_NORM: "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def an_index_that_is_no_json(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"\x80": "a"}}')
    return tmp_path


def a_link_out_of_the_root(tmp_path):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    save(outside / "weights.safetensors", weights_of(1))
    (tmp_path / "link").symlink_to(outside)
    return "link/weights.safetensors"


def a_linked_shard(tmp_path):
    a_link_out_of_the_root(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.safetensors").symlink_to(tmp_path / "link" / "weights.safetensors")
    return folder


def a_loop_of_links(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return "loop/weights.safetensors"


def all_but_one(tmp_path):
    tensors = weights_of(1)
    del tensors[LAST_NORM]
    return save(tmp_path / "weights.safetensors", tensors)


INVALID_WEIGHTS = {
    "does not exist": lambda tmp_path: tmp_path / "nothing.safetensors",
    "is not a valid path": lambda tmp_path: "a\0b",
    "does not exist, or is not a file": a_shard_that_is_missing,
    "is not an index of safetensors files": an_index_that_is_no_json,
    "has no .safetensors file": a_folder_without_weights,
    "is outside --weights-root": lambda tmp_path: "../elsewhere/weights.safetensors",
    "outside --weights-root": lambda tmp_path: "/etc/passwd",
    "link/weights.safetensors' is outside": a_link_out_of_the_root,
    "a.safetensors' is outside": a_linked_shard,
    "Symlink loop": a_loop_of_links,
    "is truncated": lambda tmp_path: corrupted(tmp_path, lambda data: data[:-1]),
    "is truncated: 3 bytes": lambda tmp_path: corrupted(tmp_path, lambda data: data[:3]),
    "is truncated: its header": lambda tmp_path: corrupted(tmp_path, lambda data: data[:40]),
    "1 bytes that belong to no tensor": lambda tmp_path: corrupted(tmp_path, lambda d: d + b"x"),
    "is a pickle": lambda tmp_path: corrupted(tmp_path, lambda data: b"\x80\x04}."),
    "its header is too long": lambda tmp_path: corrupted(
        tmp_path, lambda d: b"\xff" * 7 + b"\0" * 9
    ),
    "broken safetensors header": lambda tmp_path: corrupted(tmp_path, lambda d: header_of(b"{]")),
    "holds no tensor": lambda tmp_path: corrupted(tmp_path, lambda data: header_of(b"{}")),
    "within 0 and": lambda tmp_path: corrupted(
        tmp_path,
        lambda d: header_of(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"1234"),
    ),
    "unknown type 'F3'": lambda tmp_path: corrupted(
        tmp_path,
        lambda d: header_of(b'{"a":{"dtype":"F3","shape":[1],"data_offsets":[0,4]}}', b"1234"),
    ),
    "needs 8 bytes": lambda tmp_path: corrupted(
        tmp_path,
        lambda d: header_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
    ),
    "no tensor 'adapter.weight'": lambda t: with_changed_tensors(t, adapter__weight=torch.ones(3)),
    "has the shape [129]": lambda t: with_changed_tensors(t, model__norm__weight=torch.ones(129)),
    "cannot become torch.float32": lambda t: with_changed_tensors(
        t, model__norm__weight=torch.ones(128, dtype=torch.int32)
    ),
    "1 of the model's 38 tensors are missing": all_but_one,
}


@pytest.mark.parametrize("reason", INVALID_WEIGHTS, ids=lambda reason: reason.replace(" ", "-"))
def test_weights_that_cannot_be_loaded_are_reported_and_change_nothing(stage, tmp_path, reason):
    before, text = stage.checksum(), stage.generate()["text"]
    result = stage.update(INVALID_WEIGHTS[reason](tmp_path), weight_version="v9")
    assert not result.success
    assert reason in result.message
    assert result.message == result.error
    assert result.message.endswith("the weights of version 'default' are whole")
    facts = stage.facts()
    assert (facts["weight_version"], facts["engine_paused"]) == ("default", False)
    assert (facts["model_path"], stage.checksum()) == ("tiny", before)
    assert stage.generate()["text"] == text


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({}, "either"),
        ({"files": []}, "either"),
        ({"files": ["a"], "tensors": {"a": "b"}}, "either"),
        ({"flies": ["a"]}, "unknown field `flies`"),
        ({"files": [{"path": "a", "md5": "b"}]}, "unknown field `md5`"),
        ({"files": [1]}, "Expected"),
        ({"tensors": ["a"]}, "Expected `object"),
        ({"files": ["../../etc/passwd"]}, "is outside --weights-root"),
        ({"files": [""]}, "model_path must be"),
        ({"tensors": {LAST_NORM: "norm.safetensors", "x": "norm.safetensors"}}, "no tensor 'x'"),
    ],
)
def test_an_invalid_manifest_is_refused(stage, tmp_path, manifest, reason):
    before = stage.checksum()
    save_file({LAST_NORM: torch.ones(128)}, tmp_path / "norm.safetensors")
    result = stage.update(tmp_path, manifest=manifest)
    assert not result.success
    assert reason in result.message
    assert stage.checksum() == before


def test_another_load_format_is_refused(stage, tmp_path):
    result = stage.update(tmp_path, load_format="pickle")
    assert not result.success
    assert "load_format 'pickle' is not supported" in result.message


# Requests and pauses


def test_an_update_is_refused_during_active_requests_which_are_named(stage, tmp_path):
    save(tmp_path / "new.safetensors", weights_of(1))
    request_id = stage.submit(max_new_tokens=4000, stream=True)
    stage.next(ResultChunk)
    result = stage.update("new.safetensors", weight_version="v1")
    assert not result.success
    assert result.message.startswith("active requests are present; set abort_all_requests=true")
    assert result.error == "active requests present during weight update"
    details = {
        key: result.data[key] for key in result.data if key[:6] in ("active", "abort_", "pause_")
    }
    assert details == {
        "active_request_count": 1,
        "active_request_ids": [request_id],
        "abort_all_requests": False,
        "pause_mode": None,
    }
    assert result.data["engine_paused"] is False
    assert stage.facts()["weight_version"] == "default"


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_requests_survive_an_update_only_in_a_retracting_pause(stage, tmp_path, mode):
    save(tmp_path / "new.safetensors", weights_of(1))
    stage.admin("pause_generation", mode=mode)
    stage.submit()
    assert not stage.update("new.safetensors").success
    stage.admin("pause_generation", mode="retract")
    result = stage.update("new.safetensors")
    assert (result.success, result.data["engine_paused"]) == (True, True)


def test_a_retracted_request_is_computed_again_with_the_new_weights(stage, tmp_path):
    save(tmp_path / "new.safetensors", weights_of(1))
    request_id = stage.submit(max_new_tokens=200, stream=True)
    stage.next(ResultChunk)
    stage.admin("pause_generation", mode="retract")
    assert stage.update("new.safetensors", weight_version="v1").success
    stage.admin("continue_generation")
    data = stage.result(request_id)
    assert (data["weight_version"], data["usage"]["completion_tokens"]) == ("v1", 200)


def test_requests_are_dropped_only_for_weights_that_fit(stage, tmp_path):
    save(tmp_path / "new.safetensors", weights_of(1))
    request_id = stage.submit(max_new_tokens=4000, stream=True)
    stage.next(ResultChunk)
    result = stage.update("nothing.safetensors", abort_all_requests=True)
    assert (result.success, result.data["num_paused_requests"]) == (False, 0)
    result = stage.update("new.safetensors", abort_all_requests=True)
    assert (result.success, result.data["num_paused_requests"]) == (True, 1)
    (dropped,) = [message for message in stage.received if isinstance(message, StageFailure)]
    assert (dropped.request_id, dropped.kind) == (request_id, "dropped")


def test_an_update_restores_the_pause_state_unless_keep_pause_is_set(stage, tmp_path):
    save(tmp_path / "new.safetensors", weights_of(1))
    result = stage.update("new.safetensors", keep_pause=True)
    assert (result.data["keep_pause"], result.data["engine_paused"]) == (True, True)
    assert stage.facts()["engine_paused"] is True
    assert stage.update("new.safetensors").data["engine_paused"] is True
    stage.admin("continue_generation")
    assert stage.update("nothing", keep_pause=True).data["engine_paused"] is True
    stage.admin("continue_generation")
    assert stage.update("nothing").data["engine_paused"] is False


def test_without_a_weights_root_no_file_is_read(tmp_path):
    from tests.replica.weights.stage_fixture import running

    save(tmp_path / "new.safetensors", weights_of(1))
    with running(weights_root="") as stage:
        result = stage.update(tmp_path / "new.safetensors")
        assert not result.success
        assert "--weights-root" in result.message


def test_a_file_is_prefetched_while_requests_use_the_old_weights(stage, tmp_path):
    new = weights_of(1)
    file = save(tmp_path / "coming.safetensors", new)
    old_text = stage.generate()["text"]
    request_id = stage.submit()
    result = stage.admin("read_weights_ahead", model_path=str(file), nbytes=file.stat().st_size)
    assert (result.success, result.data["ahead_bytes"]) == (
        True,
        sum(t.nbytes for t in new.values()),
    )
    assert stage.result(request_id)["text"] == old_text
    assert stage.checksum() == checksum_of(weights_of(0))
    file = file.rename(tmp_path / "whole.safetensors")
    assert stage.update(file, weight_version="v1").success
    assert stage.checksum() == checksum_of(new)
    refused = stage.admin("read_weights_ahead", model_path=str(tmp_path / "none"), nbytes=1)
    assert not refused.success
    assert "does not exist" in refused.message
