import io
import tarfile

import pytest

from tools.release import PARTS, ROOT, copy, main, normalize


def archive(path, members, *, at, owner):
    with tarfile.open(path, "w:gz") as file:
        for name, content, mode in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uid, member.mode = len(content), at, owner, mode
            file.addfile(member, io.BytesIO(content))
    return path


def test_archives_with_equal_contents_get_equal_bytes(tmp_path):
    members = [("b/two", b"2", 0o664), ("b/one", b"1", 0o755)]
    first = archive(tmp_path / "first.tar.gz", members, at=1, owner=1000)
    second = archive(tmp_path / "second.tar.gz", members[::-1], at=2, owner=0)
    assert first.read_bytes() != second.read_bytes()
    for path in (first, second):
        normalize(path, at=315532800)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as read:
        assert [(m.name, m.mode, m.mtime, m.uid) for m in read] == [
            ("b/one", 0o755, 315532800, 0),
            ("b/two", 0o644, 315532800, 0),
        ]
        assert read.extractfile("b/two").read() == b"2"


def test_different_contents_give_different_archives(tmp_path):
    paths = [
        archive(tmp_path / f"{content}.tar.gz", [("a", content.encode(), 0o644)], at=1, owner=0)
        for content in ("x", "y")
    ]
    for path in paths:
        normalize(path, at=5)
    assert paths[0].read_bytes() != paths[1].read_bytes()


def test_a_source_archive_has_the_named_parts_and_no_build_outputs(tmp_path):
    copy(tmp_path / "source")
    assert {path.name for path in (tmp_path / "source").iterdir()} == set(PARTS)
    assert (tmp_path / "source/omni_proxy/py.typed").exists()
    built = [*tmp_path.rglob("*.pyc"), *tmp_path.rglob("*.egg-info")]
    assert built == []


def test_each_folder_of_the_project_is_in_the_source_archive():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"}
    folders = {name for name in folders if not name.endswith(".egg-info")}
    assert folders - {"build", "dist"} <= set(PARTS)


@pytest.mark.parametrize("arguments", [[], ["sbom"], ["pack", "x"]])
def test_wrong_arguments_show_the_usage(arguments, capsys):
    assert main(arguments) == 2
    assert "python -m tools.release" in capsys.readouterr().err
