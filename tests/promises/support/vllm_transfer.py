"""A weight transfer backend for vLLM that needs no GPU: "gloo" instead of "nccl".

A plug-in of vLLM can register backends by name. This one does the same as vLLM's dense backend, but
over torch's gloo: the trainer has rank 0 and the store, `init_info` has its address, and each chunk
is one broadcast per tensor. So a real engine can run rounds on a machine without a GPU. It runs in
vLLM's Python; `install` creates the folder for its PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

BACKEND = "gloo"
PLUGIN = "omni_gloo_transfer"
JOIN_SECS = 60


def install(folder: Path) -> None:
    """Writes this module as a plug-in of vLLM, with the entry point by which vLLM loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{PLUGIN}.py").write_text(Path(__file__).read_text())
    metadata = folder / f"{PLUGIN}-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = {PLUGIN}:register\n"
    )


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine())


def joined(host: str, port: int, rank: int, world_size: int):
    """Joins the group of a trainer with a store there, with the keys of vLLM's stateless groups."""
    from datetime import timedelta

    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch.distributed import PrefixStore, TCPStore

    patience = timedelta(seconds=JOIN_SECS)
    store = TCPStore(host, port, world_size, False, patience, wait_for_workers=False)
    return ProcessGroupGloo(PrefixStore(f"tcp://{host}:{port}", store), rank, world_size, patience)


def _engine():
    from dataclasses import dataclass

    import torch
    from vllm.distributed.weight_transfer import base
    from vllm.model_executor.model_loader import reload

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):
        master_address: str
        master_port: int
        rank_offset: int
        world_size: int

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):
        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]

    class GlooTransfer(base.WeightTransferEngine):
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        supports_draft_weight_update = False

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.group = None

        def init_transfer_engine(self, init_info):
            rank = init_info.rank_offset + self.parallel_config.rank
            self.group = joined(
                init_info.master_address, init_info.master_port, rank, init_info.world_size
            )

        def start_weight_update(self):
            reload.initialize_layerwise_reload(self.model)

        def finish_weight_update(self):
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info):
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info):
            if self.group is None:
                raise RuntimeError("weight transfer not initialized")
            for name, kind, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                weight = torch.empty(shape, dtype=getattr(torch, kind))
                self.group.broadcast(weight, 0).wait()
                self.model.load_weights([(name, weight)])

        def shutdown(self):
            self.group = None

    return GlooTransfer
