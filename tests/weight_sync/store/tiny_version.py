"""The tiny model's weights as a stored version, and a fleet of given URLs."""

from __future__ import annotations

from datetime import UTC, datetime

from omni_proxy.config.overlay import desired_workers
from omni_proxy.config.schema import Config, WorkerEntry
from omni_proxy.config.state import SavedState
from omni_proxy.fleet.registry import Fleet
from omni_proxy.process_group.tensor_plan import make_plan


def tiny_version(store, seed, *, files=1, digests=True):
    """A sealed version with its tensors in this number of files."""
    from omni_proxy.process_group.broadcast.tensor_hashing import tensor_digest
    from omni_proxy.replica.models import tiny

    tensors = {
        n: parameter.detach().contiguous() for n, parameter in tiny.build(seed).named_parameters()
    }
    names = list(tensors)
    draft = store.begin(16 << 20)
    for part in range(files):
        names_of_file = names[part::files]
        specs = [(n, str(tensors[n].dtype), list(tensors[n].shape)) for n in names_of_file]
        block = draft.add([make_plan(specs).tensors])
        with open(block.path, "r+b") as file:
            file.seek(block.starts[0])
            file.writelines(tensors[name].numpy().tobytes() for name in names_of_file)
        if digests:
            draft.set_digests(
                {
                    n: tensor_digest(n, str(t.dtype), t.shape, t.numpy().tobytes())
                    for n, t in tensors.items()
                    if n in names_of_file
                }
            )
    return store.seal(draft)


def fleet_of(*urls):
    fleet = Fleet()
    config = Config(workers=tuple(WorkerEntry(url=url) for url in urls))
    fleet.apply(desired_workers(config, (), SavedState()), datetime.now(UTC))
    return fleet
