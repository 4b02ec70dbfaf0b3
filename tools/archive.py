"""`python -m tools.archive FOLDER OUT.pyz`: packs an installed program into one file.

Running the file requires the same minor version of Python and the same platform.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

from tools import archive_main

SHEBANG = b"#!/usr/bin/env python3\n"


def pack(folder: Path, out: Path) -> None:
    """Pack `folder`, made by `pip install --target`, into `out`. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = hashlib.sha256()
    for path in files:
        content.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        content.update(path.read_bytes())
    made_for = "{}.{} ".format(*sys.version_info) + content.hexdigest()[:24]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        file.write(SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
            _add(zipped, "__main__.py", Path(archive_main.__file__).read_bytes())
            _add(zipped, archive_main.MADE_FOR, made_for.encode())
            for path in files:
                name = archive_main.APP + str(path.relative_to(folder))
                _add(zipped, name, path.read_bytes(), path.stat().st_mode)
    out.chmod(0o755)


def _add(zipped: zipfile.ZipFile, name: str, content: bytes, mode: int = 0o644) -> None:
    """Add a file without its modification time, so that equal contents give equal archives."""
    member = zipfile.ZipInfo(name)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = mode << 16
    zipped.writestr(member, content)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    for found in [*folder.rglob("tests"), *folder.rglob("_tests"), *folder.glob("bin")]:
        shutil.rmtree(found)
    for name in ("direct_url.json", "RECORD"):  # these contain the path of the build folder
        for path in folder.glob(f"*.dist-info/{name}"):
            path.unlink()
    pack(folder, out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
