"""Builds the native form of the hot modules: the same .py files, with the .pxd files beside them.

tools/build-native calls it, with an interpreter that has Cython: `-m tools.native_build.build WORK
OUT`. WORK keeps what was made before, so only what changed is compiled. Classes that a .pxd
declares become C structs; functions that it declares are called as C. What no .pxd names stays
Python's, compiled.
"""

import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from tools.native_build.constants import with_values

ROOT = Path(__file__).parents[2]
# A read of a field of None raises, an index is checked, and so is what a typed field is set to.
DIRECTIVES = {
    "language_level": "3",
    "nonecheck": True,
    "boundscheck": True,
    "auto_pickle": False,
    "annotation_typing": False,
}
FLAGS = ("-O2", "-fPIC", "-shared", "-w", "-fno-semantic-interposition", "-fwrapv")
SUFFIX = EXTENSION_SUFFIXES[0]
# A .pyx in the place of the .py is what has no Python: such modules are few and small.
MODULES = (
    "omni_proxy.dataplane.loop.event_loop",
    "omni_proxy.dataplane.loop.task",
    "omni_proxy.dataplane.loop.io_task",
    "omni_proxy.dataplane.loop.sockets",
    "omni_proxy.dataplane.loop.stream",
    "omni_proxy.dataplane.exchange.exchange",
    "omni_proxy.dataplane.exchange.exchange_io",
    "omni_proxy.dataplane.exchange.exchange_steps",
    "omni_proxy.dataplane.exchange.fast_path",
    "omni_proxy.dataplane.exchange.fast_path_cache",
    "omni_proxy.dataplane.exchange.response_relay",
    "omni_proxy.dataplane.upstream.acquire",
    "omni_proxy.dataplane.upstream.attempt",
    "omni_proxy.dataplane.upstream.pool",
    "omni_proxy.dataplane.admission.inflight",
    "omni_proxy.dataplane.services",
    "omni_proxy.dataplane.settings",
    "omni_proxy.fleet.registry",
    "omni_proxy.fleet.worker",
    "omni_proxy.routing.inspect.body_fields",
    "omni_proxy.routing.inspect.requirements",
    "omni_proxy.routing.inspect.usual_body",
    "omni_proxy.routing.pick",
    "omni_proxy.routing.inspect.prefix_text",
    "omni_proxy.routing.inspect.prompt_tokens",
    "omni_proxy.routing.kv_events.block_index",
    "omni_proxy.routing.kv_events.block_keys",
    "omni_proxy.routing.kv_events.spelled_ids",
    "omni_proxy.routing.policies.event_aware",
    "omni_proxy.routing.prefix_tree",
    "omni_proxy.routing.tree_key",
    "omni_proxy.routing.policies.cache_aware",
    "omni_proxy.routing.policies.cache_feedback",
    "omni_proxy.routing.policies.least_request",
    "omni_proxy.routing.policies.round_robin",
    "omni_proxy.telemetry.bucket_index",
    "omni_proxy.telemetry.metrics",
    "omni_proxy.telemetry.recent_window",
    "omni_proxy.wire.head_caching.response_heads",
    "omni_proxy.wire.response",
    "omni_proxy.wire.scan.head_template",
    "omni_proxy.wire.scan.whole_chunks",
)
# A .pxd can't give types to the locals of a generator: here annotations do.
ANNOTATED = frozenset(
    ("omni_proxy.dataplane.exchange.response_relay", "omni_proxy.routing.policies.least_request")
)
_STRUCT = re.compile(r"class (\w+)\(msgspec\.Struct, gc=False\):")
_SLOTTED = re.compile(r"(@dataclass\()(frozen=True)?(?:, )?slots=True\)\nclass (\w+)")
_GENERIC = re.compile(r"class (\w+)\(Generic\[\w+\]\):")
_CIMPORT = re.compile(r"^from (\S+) cimport", re.MULTILINE)
_CLASS = re.compile(r"^cdef class (\w+)", re.MULTILINE)


def without_slots(text: str, declared: set[str]) -> str:
    """Of data classes that a .pxd declares: Cython refuses `slots=True`, which they have anyway."""

    def plain(found: re.Match[str]) -> str:
        if found[3] not in declared:
            return found[0]
        return f"{found[1]}{found[2] or ''})\nclass {found[3]}"

    def as_data_class(found: re.Match[str]) -> str:
        return f"@dataclass\nclass {found[1]}:" if found[1] in declared else found[0]

    def not_generic(found: re.Match[str]) -> str:
        return f"class {found[1]}:" if found[1] in declared else found[0]

    return _STRUCT.sub(as_data_class, _SLOTTED.sub(plain, _GENERIC.sub(not_generic, text)))


def copy_sources(folder: Path) -> None:
    """What Cython reads, each file only if it has changed."""
    for name in MODULES:
        source = source_of(ROOT, name)
        pxd = source.with_suffix(".pxd")
        declared = set(_CLASS.findall(pxd.read_text())) if pxd.exists() else set()
        text = source.read_text()
        if source.suffix == ".py":
            text = with_values(without_slots(text, declared), ROOT)
        _write(folder / source.relative_to(ROOT), text)
    for pxd in ROOT.glob("omni_proxy/**/*.pxd"):
        _write(folder / pxd.relative_to(ROOT), pxd.read_text())


def source_of(root: Path, name: str) -> Path:
    path = root / f"{name.replace('.', '/')}.pyx"
    return path if path.exists() else path.with_suffix(".py")


def _write(target: Path, text: str) -> None:
    if target.exists() and target.read_text() == text:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    folder = target.parent
    while folder.name != "src":
        (folder / "__init__.py").touch()
        folder = folder.parent


def read_by(source: Path, root: Path) -> set[Path]:
    """The source and the .pxd files that it reads, directly or not."""
    found: set[Path] = set()
    left = [source, source.with_suffix(".pxd")]
    while left:
        path = left.pop()
        if path not in found and path.exists():
            found.add(path)
            names = _CIMPORT.findall(path.read_text()) if path.suffix == ".pxd" else ()
            left += [root / f"{name.replace('.', '/')}.pxd" for name in names]
    return found


def translate(work: Path) -> bool:
    """To C; whether all could be."""
    from Cython.Compiler.Errors import CompileError  # type: ignore[import-not-found]
    from Cython.Compiler.Main import (  # type: ignore[import-not-found]
        CompilationOptions,
        compile_single,
    )

    folder, whole = work / "src", True
    copy_sources(folder)
    os.chdir(folder)
    for name in MODULES:
        source, target = source_of(folder, name), work / f"{name}.c"
        newest = max(path.stat().st_mtime for path in read_by(source, folder))
        if target.exists() and target.stat().st_mtime > newest:
            continue
        directives = DIRECTIVES | {"annotation_typing": name in ANNOTATED}
        options = CompilationOptions(
            compiler_directives=directives, output_file=str(target), include_path=["."]
        )
        try:
            path = str(source.relative_to(folder))
            failed = compile_single(path, options, full_module_name=name).num_errors > 0
        except CompileError:
            failed = True
        if failed:
            whole = False
            target.unlink(missing_ok=True)
    return whole


def compile_one(name: str, work: Path, out: Path) -> bool:
    source, target = work / f"{name}.c", out / f"{name}{SUFFIX}"
    if target.exists() and target.stat().st_mtime > source.stat().st_mtime:
        return True
    include = sysconfig.get_paths()["include"]
    more = os.environ.get("NATIVE_FLAGS", "").split()
    argv = [
        os.environ.get("CC", "cc"),
        *FLAGS,
        *more,
        f"-I{include}",
        str(source),
        "-o",
        str(target),
    ]
    return subprocess.run(argv, check=False).returncode == 0


def main() -> int:
    work, out = (Path(word).resolve() for word in sys.argv[1:3])
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    if not translate(work):
        return 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        whole = all(list(pool.map(lambda name: compile_one(name, work, out), MODULES)))
    for stale in out.glob(f"*{SUFFIX}"):
        if stale.name.removesuffix(SUFFIX) not in MODULES:
            stale.unlink()
    if whole:
        for name in MODULES:  # also those whose text gave the same C: see `native.newer_source`
            (out / f"{name}{SUFFIX}").touch()
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
