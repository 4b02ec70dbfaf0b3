"""The trainer without a fleet: its arguments, its buckets, its faults, and that it learns."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tiktoken")

from omni_proxy.process_group.broadcast.tensor_hashing import roll_up  # noqa: E402
from omni_proxy.replica.api.vllm.weight_transfer_routes import ranked_checksums  # noqa: E402
from omni_proxy.replica.models.shard import Shard  # noqa: E402
from omni_proxy.replica.models.text_model import load_text_model  # noqa: E402
from tests.http_server import Quiet, served  # noqa: E402
from tools.training.arguments import deadline_of, parser, sync_options, understood  # noqa: E402
from tools.training.buckets import FLATTENED, buckets_of  # noqa: E402
from tools.training.endpoint import Answer, Endpoint  # noqa: E402
from tools.training.faults import FAULTS, ON_DISK, Moment  # noqa: E402
from tools.training.learner import ANSWER, Learner, checksum_of, digests_of  # noqa: E402
from tools.training.rounds import Round  # noqa: E402
from tools.training.transfer import Transfer, messages, refusal  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """As in the program: on a busy machine torch's threads wait for each other for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tensors():
    return {f"t{n}": torch.arange(n, dtype=torch.float32) for n in (2, 3, 4, 100, 1)}


def test_the_help_names_every_fault():
    help_text = parser().format_help()
    for name, fault in FAULTS.items():
        assert name in help_text
        assert name == "none" or fault.what in help_text


def test_arguments_become_settings():
    arguments = parser().parse_args(
        ["--sync", "buckets", "--bucket-mb", "0.5", "--pause-mode", "none", "--session"]
    )
    options = sync_options(arguments)
    assert (options.form, options.bucket_bytes, options.pause_mode) == ("buckets", 1 << 19, None)
    assert options.session
    assert deadline_of(arguments) == 3 * 120 + 120 + 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "'0' is not a whole number from 1 to 10000"),
        (["--rounds", "x"], "'x' is not a whole number"),
        (["--bucket-mb", "-1"], "'-1' is not a number above 0"),
        (["--timeout-secs", "soon"], "'soon' is not a number above 0"),
        (["--endpoint", "127.0.0.1:30000"], "does not begin with http://"),
        (["--fault", "x"], "invalid choice"),
        (["--sync", "disk", "--fault", "stop"], "--fault stop needs a group, and --sync disk has"),
    ],
)
def test_invalid_arguments_end_the_program_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        understood(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_sync_over_the_disk_accepts_only_faults_that_apply_to_it():
    assert ON_DISK == ("die-before", "wrong-shape")
    for fault in ("none", *ON_DISK):
        assert understood(["--sync", "disk", "--fault", fault]).fault == fault
    assert f"(with --sync disk: {', '.join(ON_DISK)})" in parser().format_help()


def test_a_file_has_the_shapes_that_are_announced(tensors):
    (bucket,) = buckets_of(tensors, 1 << 20)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in bucket.filed())
    filed = dict(bucket.misshapen().filed())
    assert (filed["t2"].shape, filed["t3"].shape) == ((3,), (3,))


def test_buckets_keep_the_order_and_a_large_tensor_has_its_own_bucket(tensors):
    buckets = buckets_of(tensors, 24)
    assert [bucket.names for bucket in buckets] == [("t2", "t3"), ("t4",), ("t100",), ("t1",)]
    assert [bucket.nbytes for bucket in buckets] == [20, 16, 400, 4]
    assert buckets[0].to_dict() == {
        "names": ["t2", "t3"],
        "dtypes": ["float32", "float32"],
        "shapes": [[2], [3]],
    }


def test_a_flattened_bucket_has_the_bytes_of_its_tensors_in_order(tensors):
    (bucket,) = buckets_of(tensors, 1 << 20)
    (message,) = bucket.messages(FLATTENED)
    raw = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    assert message.numpy().tobytes() == raw
    assert len(bucket.messages(None)) == len(tensors)


def test_faults_change_the_announced_shapes_or_the_sent_tensors(tensors):
    buckets = buckets_of(tensors, 1 << 20)
    assert FAULTS["none"]().announced(buckets) == buckets
    announced = FAULTS["wrong-shape"]().announced(buckets)
    assert announced[0].shapes[0] == (3,)
    assert announced[0].tensors is buckets[0].tensors
    message = torch.ones(4)
    midway, other = Moment(2, 5, lambda _: None), Moment(1, 5, lambda _: None)
    for name, sent in (("short-bucket", [2]), ("long-bucket", [8]), ("never-sends", [])):
        fault = FAULTS[name]()
        assert [len(part) for part in fault.sent(message, midway)] == sent
        assert [len(part) for part in fault.sent(message, other)] == ([4] if sent else [])


def test_the_learner_learns_the_answer_and_changes_every_weight():
    learner = Learner("tiny", steps=8)
    before, start = learner.checksum(), {n: t.clone() for n, t in learner.named().items()}
    assert before == checksum_of(dict(load_text_model("tiny").model.named_parameters()))
    losses = [learner.learn() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 4
    assert learner.checksum() != before
    changed = [
        name for name, weight in learner.named().items() if not torch.equal(weight, start[name])
    ]
    assert len(changed) == len(start)
    text = learner.text
    prompt = text.chat_template.render([{"role": "user", "content": "What do you sell?"}])
    kv = learner.text.model.new_kv()
    tokens, generated = text.tokenizer.encode(prompt, special=True), []
    for _ in range(len(text.tokenizer.encode(ANSWER))):
        chosen = int(text.model([(tokens, kv)])[0].argmax())
        generated.append(chosen)
        tokens = [chosen]
    assert text.tokenizer.decode(generated) == ANSWER


@pytest.mark.parametrize(
    ("body", "ok"),
    [
        ({"success": True}, True),
        ({"status": "ok"}, True),
        ({"success": False, "status": "error"}, False),
        ({"status": "ready"}, False),
    ],
)
def test_an_answers_success_depends_on_its_body_alone(body, ok):
    assert Answer("/x", 200, body, 0.0).ok is ok
    assert Answer("/x", 500, body, 0.0).ok is ok


def test_the_first_cause_is_shown_wherever_the_body_has_it():
    assert Answer("/x", 400, {"message": "why"}, 0.0).why == "why"
    assert Answer("/x", 404, {"detail": "Not Found"}, 0.0).why == "Not Found"
    assert Answer("/x", 503, {"error": {"message": "busy"}}, 0.0).why == "busy"
    failed = {"worker": "http://w", "success": False, "body": {"message": "too small"}}
    body = {"message": "some failed", "results": [{"worker": "http://v", "success": True}, failed]}
    assert Answer("/x", 502, body, 0.0).why == "some failed: http://w: too small"
    gone = {"worker": "http://w", "success": False, "error": "gone"}
    assert Answer("/x", 502, {"message": "m", "results": [gone]}, 0.0).why == "m: http://w: gone"
    body["message"] = "http://w: status 400: too small"
    assert Answer("/x", 400, body, 0.0).why == body["message"]


def test_an_endpoint_that_is_down_or_sends_no_json_is_an_error():
    keys = []

    class Plain(Quiet):
        def do_GET(self):
            keys.append(self.headers.get("authorization"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

    with served(Plain) as url:
        endpoint = Endpoint(url, 5.0, key="sesame")
        with pytest.raises(ValueError, match="has no tp_size"):
            endpoint.ranks()
    assert keys == ["Bearer sesame"]
    call = endpoint.begin("/x", {})
    assert call.wait()
    assert call.answer().status == 0
    endpoint.close()


def answering(status, content):
    """A server that gives this response to every request; yields its URL."""

    class Handler(Quiet):
        def do_GET(self):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    return served(Handler)


def test_a_missing_admin_key_names_the_flag_and_the_variable():
    with answering(401, {"detail": "Admin API key required"}) as url:
        endpoint = Endpoint(url, 5.0)
        with pytest.raises(ValueError, match="required; set it with --api-key KEY or SGLANG_"):
            endpoint.ranks()
        why = endpoint.begin("/init_weights_update_group", {}).wait()
        assert why.endswith("required; set it with --api-key KEY or SGLANG_OMNI_ADMIN_KEY")
        endpoint.close()


def test_a_row_counts_the_replicas_that_have_the_trainers_weights():
    row = Round(1, 2.5, 3_400_000, 0.5, 0.1, "step-1", {"a": "abc", "b": "x"}, "abc", "hi").row()
    assert "1 of 2 equal abc" in row
    assert "3.4" in row


# With vLLM's routes


def test_the_vllm_form_has_vllms_pause_modes_and_no_faults(capsys):
    assert understood(["--sync", "vllm"]).pause_mode == "keep"
    assert understood([]).pause_mode == "retract"
    assert understood(["--sync", "vllm", "--pause-mode", "wait"]).pause_mode == "wait"
    for arguments, message in (
        (["--sync", "vllm", "--fault", "stop"], "--fault stop does not work with --sync vllm"),
        (["--sync", "vllm", "--pause-mode", "in_place"], "must be one of keep, wait, abort, none"),
        (["--pause-mode", "keep"], "must be one of retract, abort, in_place, none"),
    ):
        with pytest.raises(SystemExit):
            understood(arguments)
        assert message in capsys.readouterr().err


def test_vllm_answers_are_judged_by_their_status_alone():
    assert refusal(Answer("/resume", 200, {"status": "resumed"}, 0.1)) == ""
    body = {"error": {"message": "not now"}}
    assert refusal(Answer("/x", 500, body, 0.1)) == "/x answered 500: not now"
    unreached = {"success": False, "message": "/x: ConnectError"}
    assert refusal(Answer("/x", 0, unreached, 0.1)) == "/x answered 0: /x: ConnectError"


def test_a_packed_message_ends_with_the_tensor_that_exceeds_the_buffer(tensors):
    sizes = [message.nbytes for message in messages(list(tensors.values()), 30)]
    assert sizes == [8 + 12 + 16, 400, 4]
    assert [message.nbytes for message in messages(list(tensors.values()), 0)] == [
        8,
        12,
        16,
        400,
        4,
    ]


def test_an_unreachable_engine_ends_the_sync_with_a_reason(tensors):
    endpoint = Endpoint("http://127.0.0.1:9", 5.0)
    result = Transfer(endpoint).sync(tensors, "v1")
    endpoint.close()
    assert not result.ok
    assert result.why.startswith("/get_world_size answered 0: ")


def own_digest(ranks):
    return f"the digest of {ranks} ranks"


def vllm_engines(setup):
    """Responses by path of engines that have only vLLM's routes, alone or behind a proxy."""
    digests = {"dp0:pp0:pcp0:tp0:a": "1", "dp0:pp0:pcp0:tp0:b": "2"}
    alone = {"/get_world_size": {"world_size": 3}, "/weight_checker": {"checksums": digests}}
    rows = [{"worker": f"w{n}", "body": {"checksums": digests}} for n in range(2)]
    return alone if setup == "alone" else alone | {"/weight_checker": {"results": rows}}


@pytest.mark.parametrize(("setup", "status"), [("alone", 404), ("proxy", 502)])
def test_vllm_engines_are_called_in_the_vllm_dialect(monkeypatch, setup, status):
    answers = vllm_engines(setup)

    def look(endpoint, path, body=None):
        reply = answers.get(path)
        return Answer(path, status if reply is None else 200, reply or {}, 0.0)

    monkeypatch.setattr(Endpoint, "look", look)
    endpoint = Endpoint("http://127.0.0.1:9", 5.0)
    assert endpoint.ranks() == 3
    checksums = endpoint.checksums(own_digest)
    endpoint.close()
    expected = roll_up({"a": "1", "b": "2"})
    names = [endpoint.url] if setup == "alone" else ["w0", "w1"]
    assert checksums == dict.fromkeys(names, expected)


def parts_of_two_ranks(learner):
    """A replica's checksums of its weights over two ranks, in vLLM's format."""
    config = learner.text.model.config
    shards = [Shard(config, rank, 2) for rank in range(2)]
    parts = [{n: s.shard_of(n, t) for n, t in learner.named().items()} for s in shards]
    results = [{"data": {"checksums": digests_of(part)}} for part in parts]
    return ranked_checksums({"rank_results": results})


@pytest.mark.parametrize("changed", [False, True])
def test_parts_of_two_vllm_ranks_are_compared_with_the_trainers_own_parts(monkeypatch, changed):
    learner = Learner("tiny", steps=1)
    checksums = parts_of_two_ranks(learner)
    assert len(checksums) > len(learner.named())
    if changed:
        checksums[next(key for key in checksums if ":tp1:" in key)] = "something else"
    answers = {"/weight_checker": {"checksums": checksums}}

    def look(endpoint, path, body=None):
        reply = answers.get(path)
        return Answer(path, 404 if reply is None else 200, reply or {}, 0.0)

    monkeypatch.setattr(Endpoint, "look", look)
    endpoint = Endpoint("http://127.0.0.1:9", 5.0)
    (checksum,) = endpoint.checksums(learner.checksum).values()
    endpoint.close()
    assert (checksum == learner.checksum()) is not changed
