"""Builds the native form of the hot modules, from their .py files and the .pxd files beside them.

tools/build-native runs `-m tools.native_build.build CACHE OUT` with an interpreter that has Cython.
Classes that a .pxd declares become C structs, functions that it declares C functions; all other
code is compiled as Python code.

CACHE has the compiled modules, by the hash of all their inputs. Invariant: OUT gets a complete
folder, and then, in one step, the manifest that names it (see omni_proxy.native). A program that
starts during a build uses either the old or the new set; the old files are kept for programs that
have just read the old manifest.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

from tools.native_build.constants import sources_of_constants, with_values

ROOT = Path(__file__).parents[2]
# Checked at run time: fields of None, indexes, and the types of values assigned to typed fields.
DIRECTIVES = {
    "language_level": "3",
    "nonecheck": True,
    "boundscheck": True,
    "auto_pickle": False,
    "annotation_typing": False,
}
FLAGS = ("-O2", "-fPIC", "-shared", "-w", "-fno-semantic-interposition", "-fwrapv")
SUFFIX = EXTENSION_SUFFIXES[0]
MANIFEST = "manifest.json"
LOCK = ".lock"
UNUSED_SECS = 14 * 24 * 3600.0
# A module with a .pyx instead of a .py has no Python form: these are few and small.
MODULES = (
    "omni_proxy.dataplane.loop.event_loop",
    "omni_proxy.dataplane.loop.task",
    "omni_proxy.dataplane.loop.sockets",
    "omni_proxy.dataplane.loop.stream",
    "omni_proxy.dataplane.exchange.exchange",
    "omni_proxy.dataplane.exchange_io",
    "omni_proxy.dataplane.finalize",
    "omni_proxy.dataplane.drivers.exchange_steps",
    "omni_proxy.dataplane.drivers.fast_path",
    "omni_proxy.dataplane.exchange.fast_path_cache",
    "omni_proxy.dataplane.relay.response_relay",
    "omni_proxy.dataplane.upstream.balancer",
    "omni_proxy.dataplane.upstream.fleet_requirements",
    "omni_proxy.dataplane.attempt.attempt",
    "omni_proxy.dataplane.upstream.pool",
    "omni_proxy.dataplane.admission.inflight",
    "omni_proxy.dataplane.services",
    "omni_proxy.dataplane.settings",
    "omni_proxy.dataplane.timeouts",
    "omni_proxy.fleet.registry",
    "omni_proxy.fleet.worker",
    "omni_proxy.routing.inspect.body_fields",
    "omni_proxy.routing.inspect.requirements",
    "omni_proxy.routing.inspect.plain_body",
    "omni_proxy.routing.pick",
    "omni_proxy.routing.inspect.prefix_text",
    "omni_proxy.routing.inspect.prompt_tokens",
    "omni_proxy.routing.kv_events.block_index",
    "omni_proxy.routing.kv_events.block_keys",
    "omni_proxy.routing.policies.event_aware",
    "omni_proxy.routing.prefix_tree",
    "omni_proxy.routing.token_id_text",
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
# A .pxd can't declare types of a generator's locals: in these modules annotations do.
ANNOTATED = frozenset(
    ("omni_proxy.dataplane.relay.response_relay", "omni_proxy.routing.policies.least_request")
)
_STRUCT = re.compile(r"class (\w+)\(msgspec\.Struct, gc=False\):")
_SLOTTED = re.compile(r"(@dataclass\()(frozen=True)?(?:, )?slots=True\)\nclass (\w+)")
_GENERIC = re.compile(r"class (\w+)\(Generic\[\w+\]\):")
_CIMPORT = re.compile(r"^from (\S+) cimport", re.MULTILINE)
_CLASS = re.compile(r"^cdef class (\w+)", re.MULTILINE)


def without_slots(text: str, declared: set[str]) -> str:
    """Remove `slots=True` from declared data classes: Cython refuses it for cdef classes."""

    def plain(found: re.Match[str]) -> str:
        if found[3] not in declared:
            return found[0]
        return f"{found[1]}{found[2] or ''})\nclass {found[3]}"

    def as_data_class(found: re.Match[str]) -> str:
        return f"@dataclass\nclass {found[1]}:" if found[1] in declared else found[0]

    def not_generic(found: re.Match[str]) -> str:
        return f"class {found[1]}:" if found[1] in declared else found[0]

    return _STRUCT.sub(as_data_class, _SLOTTED.sub(plain, _GENERIC.sub(not_generic, text)))


class Source(NamedTuple):
    """A source file, read only once, so that the manifest describes what was compiled."""

    text: str
    size: int
    changed_at: int
    digest: str


class Job(NamedTuple):
    """The inputs that all modules of a build share."""

    sources: Path
    cache: Path
    compiler: tuple[str, ...]


def read_sources(root: Path) -> dict[str, Source]:
    """Each module's .py, .pyx and .pxd, and the modules whose constants it uses.

    The keys are paths relative to the root.
    """
    paths = {source_of(root, name).with_suffix(".py") for name in MODULES}
    paths |= {found for path in list(paths) for found in sources_of_constants(path, root)}
    paths |= {source_of(root, name) for name in MODULES}
    paths |= set(root.glob("omni_proxy/**/*.pxd"))
    found = {}
    for path in sorted(paths):
        seen, data = path.stat(), path.read_bytes()
        digest = sha256(data).hexdigest()
        found[str(path.relative_to(root))] = Source(
            data.decode(), len(data), seen.st_mtime_ns, digest
        )
    return found


def write_sources(sources: dict[str, Source], folder: Path) -> None:
    """Write the sources in the form for Cython."""
    for name, source in sources.items():
        target = folder / name
        declared = sources.get(str(Path(name).with_suffix(".pxd")))
        classes = set(_CLASS.findall(declared.text)) if declared else set()
        text = source.text
        if target.suffix == ".py":
            text = with_values(without_slots(text, classes), ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        for package in target.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
        target.write_text(text)


def source_of(root: Path, name: str) -> Path:
    path = root / f"{name.replace('.', '/')}.pyx"
    return path if path.exists() else path.with_suffix(".py")


def read_by(source: Path, root: Path) -> set[Path]:
    """The source and the .pxd files that it reads, directly or indirectly."""
    found: set[Path] = set()
    left = [source, source.with_suffix(".pxd")]
    while left:
        path = left.pop()
        if path not in found and path.exists():
            found.add(path)
            names = () if path.suffix == ".py" else _CIMPORT.findall(path.read_text())
            left += [root / f"{name.replace('.', '/')}.pxd" for name in names]
    return found


def make_one(job: Job, name: str) -> Path | None:
    """The compiled module in the cache; None if compiling failed, which was reported."""
    from Cython import __version__  # type: ignore[import-not-found]

    source = source_of(job.sources, name)
    directives = DIRECTIVES | {"annotation_typing": name in ANNOTATED}
    key = sha256(repr((__version__, directives, name)).encode())
    for path in sorted(read_by(source, job.sources)):
        key.update(f"{path.relative_to(job.sources)}\n{path.read_text()}".encode())
    code = job.cache / f"{name}-{key.hexdigest()[:24]}.c"
    if not _is_kept(code) and not translate(job, source, name, directives, code):
        return None
    key.update(repr(job.compiler).encode())
    library = job.cache / f"{name}-{key.hexdigest()[:24]}{SUFFIX}"
    if not _is_kept(library):
        made = library.with_suffix(f".{os.getpid()}")
        argv = [*job.compiler[1:], str(code), "-o", str(made)]
        if subprocess.run(argv, check=False).returncode != 0:
            return None
        made.replace(library)
    return library


def translate(job: Job, source: Path, name: str, directives: dict[str, object], to: Path) -> bool:
    """Translate a module to C."""
    from Cython.Compiler.Errors import CompileError  # type: ignore[import-not-found]
    from Cython.Compiler.Main import (  # type: ignore[import-not-found]
        CompilationOptions,
        compile_single,
    )

    os.chdir(job.sources)
    made = to.with_suffix(f".{os.getpid()}.c")
    options = CompilationOptions(
        compiler_directives=directives, output_file=str(made), include_path=["."]
    )
    try:
        path = str(source.relative_to(job.sources))
        failed = compile_single(path, options, full_module_name=name).num_errors > 0
    except CompileError:
        failed = True
    if failed:
        made.unlink(missing_ok=True)
    else:
        made.replace(to)
    return not failed


def _is_kept(path: Path) -> bool:
    try:
        os.utime(path)  # in use: see `forget`
    except FileNotFoundError:
        return False
    return True


def forget(cache: Path) -> None:
    """Delete modules that no build has used for UNUSED_SECS."""
    for path in cache.iterdir():
        if path.stat().st_mtime < time.time() - UNUSED_SECS:
            path.unlink(missing_ok=True)


def compiler() -> tuple[str, ...]:
    """The C compiler: its version, which is part of the cache key, and its command."""
    name = os.environ.get("CC", "cc")
    try:
        version = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"tools/build-native: no C compiler was found (CC): {error}")
    more = os.environ.get("NATIVE_FLAGS", "").split()
    return version.stdout, name, *FLAGS, *more, f"-I{sysconfig.get_paths()['include']}"


def publish(libraries: list[Path], sources: dict[str, Source], out: Path) -> None:
    """Publish the set of modules: a folder with a new name, then the manifest."""
    digest = sha256()
    for library in libraries:
        digest.update(library.read_bytes())
    folder = digest.hexdigest()[:16]
    sizes = {name: library.stat().st_size for name, library in zip(MODULES, libraries, strict=True)}
    manifest = {
        "suffix": SUFFIX,
        "folder": folder,
        "modules": sizes,
        "sources": {name: [*source[1:]] for name, source in sources.items()},
    }
    staged = Path(tempfile.mkdtemp(prefix=".new-", dir=out))
    try:
        for name, library in zip(MODULES, libraries, strict=True):
            shutil.copy(library, staged / f"{name}{SUFFIX}")
        staged.chmod(0o755)
        if not _are_in(out / folder, sizes):
            shutil.rmtree(out / folder, ignore_errors=True)
            staged.rename(out / folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    written = out / f".{MANIFEST}"
    written.write_text(json.dumps(manifest, indent=1) + "\n")
    written.chmod(0o644)
    before = _folder_of(out / MANIFEST)
    written.replace(out / MANIFEST)
    for path in out.iterdir():
        if path.name not in (folder, before, MANIFEST, LOCK):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _are_in(folder: Path, sizes: dict[str, int]) -> bool:
    files = {name: folder / f"{name}{SUFFIX}" for name in sizes}
    return all(file.exists() and file.stat().st_size == sizes[name] for name, file in files.items())


def _folder_of(manifest: Path) -> str:
    try:
        return str(json.loads(manifest.read_bytes())["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def main() -> int:
    cache, out = (Path(word).resolve() for word in sys.argv[1:3])
    cache.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK, "w") as lock, tempfile.TemporaryDirectory() as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time into one folder
        sources = read_sources(ROOT)
        write_sources(sources, Path(scratch))
        job = Job(Path(scratch), cache, compiler())
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            made = list(pool.map(partial(make_one, job), MODULES))
        libraries = [library for library in made if library is not None]
        if len(libraries) < len(MODULES):
            return 1
        publish(libraries, sources, out)
    forget(cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
