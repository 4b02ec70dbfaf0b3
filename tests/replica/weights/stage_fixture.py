"""A running text stage with its weight operations, and weights to load into it."""

from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_proxy.process_group.broadcast.tensor_hashing import roll_up, tensor_digest
from omni_proxy.replica.models import tiny
from omni_proxy.replica.pipeline.stage_messages import Admin, AdminResult, Result
from omni_proxy.replica.stages.text import build
from tests.replica.text.scheduler_harness import Loop, submission


def weights_of(seed: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Copies of all tensors of the tiny model that is built with `seed`."""
    model = tiny.build(seed)
    return {name: tensor.detach().clone().to(dtype) for name, tensor in model.named_parameters()}


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def checksum_of(tensors: dict[str, torch.Tensor]) -> str:
    """The checksum of a rank that has exactly these tensors, computed without a model."""
    return roll_up(
        {
            name: tensor_digest(name, str(tensor.dtype), tensor.shape, tensor.numpy().tobytes())
            for name, tensor in tensors.items()
        }
    )


class Stage:
    """Sends operations and requests to a running stage, and reads their results."""

    def __init__(self, scheduler, loop):
        self.scheduler = scheduler
        self.loop = loop
        self.received = []  # all messages, in order
        self._count = 0

    def next(self, kind, holds=lambda message: True):
        def matches(message):
            self.received.append(message)
            return isinstance(message, kind) and holds(message)

        return self.loop.next(object, matches)

    def send(self, action, payload=None, /, **fields) -> str:
        self._count += 1
        op_id = f"op-{self._count}"
        self.loop.inbox.put(Admin(op_id, action, (payload or {}) | fields))
        return op_id

    def admin_result(self, op_id) -> AdminResult:
        return self.next(AdminResult, lambda message: message.op_id == op_id)

    def admin(self, action, payload=None, /, **fields) -> AdminResult:
        return self.admin_result(self.send(action, payload, **fields))

    def update(self, path, **fields) -> AdminResult:
        return self.admin("update_weights_from_disk", model_path=str(path), **fields)

    def checksum(self) -> str:
        return self.admin("weights_checker").data["per_gpu_checksum"]

    def facts(self) -> dict:
        return self.admin("model_info").data

    def submit(self, **params) -> str:
        self._count += 1
        request_id = f"r-{self._count}"
        greedy = {"temperature": 0, "max_new_tokens": 12}
        self.loop.inbox.put(submission(request_id, **greedy | params))
        return request_id

    def result(self, request_id) -> dict:
        """The result of a request, also if it arrived while another message was awaited."""
        for message in self.received:
            if isinstance(message, Result) and message.request_id == request_id:
                return message.data
        return self.next(Result, lambda message: message.request_id == request_id).data

    def generate(self, **params) -> dict:
        return self.result(self.submit(**params))


@contextmanager
def running(**params):
    scheduler = build("decode", model="tiny", seed=0, **params)
    with Loop(scheduler) as loop:
        yield Stage(scheduler, loop)
