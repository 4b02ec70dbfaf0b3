"""The installed distributions of pyproject.toml: pip silently overwrites files of others."""

import csv
import re
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]


def normalised(requirement):
    """The name at the beginning of a requirement, normalised as in PEP 503."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def dependencies_of(wanted, installed):
    """The installed distributions that `wanted` needs, with all extras of each."""
    needed_by_name, names = {}, [normalised(requirement) for requirement in wanted]
    while names:
        name = names.pop()
        if name in installed and name not in needed_by_name:
            needed_by_name[name] = installed[name]
            names += [normalised(requirement) for requirement in installed[name].requires or ()]
    return needed_by_name


def files(distribution):
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    return [row[0] for row in rows if "__pycache__" not in row[0]]


def shared_files(distributions):
    owners = {}
    for name, distribution in distributions.items():
        for file in files(distribution):
            owners.setdefault(file, []).append(name)
    return {file: names for file, names in owners.items() if len(names) > 1}


def test_no_file_belongs_to_two_distributions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    dependencies = dependencies_of(
        wanted, {normalised(each.name): each for each in distributions()}
    )
    assert len(dependencies) > len(project["dependencies"])
    assert shared_files(dependencies) == {}


def test_a_file_of_two_distributions_is_found_in_indirect_dependencies(tmp_path):
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
    assert shared_files(dependencies_of(["A.b[x]==1"], installed)) == {"p/two.py": ["a-b", "c"]}
