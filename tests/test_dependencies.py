"""The distributions of pyproject.toml, as installed: pip writes over files without a word."""

import csv
import re
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]


def normalised(requirement):
    """The name at its beginning, as PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def needed(wanted, installed):
    """Of what is installed, what the wanted ones need, with all of their extras."""
    found, names = {}, [normalised(each) for each in wanted]
    while names:
        name = names.pop()
        if name in installed and name not in found:
            found[name] = installed[name]
            names += [normalised(each) for each in installed[name].requires or ()]
    return found


def files(distribution):
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    return [row[0] for row in rows if "__pycache__" not in row[0]]


def files_of_two(found):
    owners = {}
    for name, distribution in found.items():
        for file in files(distribution):
            owners.setdefault(file, []).append(name)
    return {file: names for file, names in owners.items() if len(names) > 1}


def test_no_file_comes_with_two_distributions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    found = needed(wanted, {normalised(each.name): each for each in distributions()})
    assert len(found) > len(project["dependencies"])
    assert files_of_two(found) == {}


def test_a_file_of_two_distributions_is_found_behind_a_dependency(tmp_path):
    def distribution(name, requires, *names):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\n{requires}\n")
        (folder / "RECORD").write_text("".join(f"{each},,\n" for each in names))
        return Distribution.at(folder)

    installed = {
        "a-b": distribution("a_b", "Requires-Dist: C>=1; extra == 'x'\n", "p/one.py", "p/two.py"),
        "c": distribution("c", "", "p/two.py", "p/three.py"),
        "other": distribution("other", "", "p/one.py"),
    }
    assert files_of_two(needed(["A.b[x]==1"], installed)) == {"p/two.py": ["a-b", "c"]}
