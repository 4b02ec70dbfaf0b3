import pytest

from omni_proxy.replica.pipeline.config import PipelineConfigError, load_pipeline

GOOD = """
name = "omni"
model_path = "tiny"
max_in_flight = 8
[entries]
tts = "b"
[[stages]]
name = "a"
factory = "some.where:make"
next = "b"
params = { size = 3, names = ["x"] }
[[stages]]
name = "b"
factory = "some.where:make"
terminal = true
process = "voice"
env = { THREADS = "2" }
"""


def test_a_file_says_everything_a_pipeline_can(tmp_path):
    (tmp_path / "p.toml").write_text(GOOD)
    loaded = load_pipeline(tmp_path / "p.toml")
    first, second = loaded.stages
    assert (loaded.name, loaded.entry, loaded.max_in_flight) == ("omni", "a", 8)
    assert loaded.entries == {"tts": "b"}
    assert first.next == ("b",)
    assert first.params == {"size": 3, "names": ["x"]}
    assert (second.process, second.env, second.terminal) == ("voice", {"THREADS": "2"}, True)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("max_in_flight", "max_inflight", "max_inflight: unknown key; did you mean max_in_flight?"),
        ("terminal = true", "terminal = 1", "stages[1].terminal: expected true or false, got 1"),
        ("terminal =", "terminl =", "stages[1].terminl: unknown key; did you mean terminal?"),
        ('name = "omni"', "", "name: is missing"),
        ('next = "b"', "next = [1]", "stages[0].next: expected a stage's name or a list"),
        ('"2"', "2", "stages[1].env: expected a table of strings"),
        ("max_in_flight = 8", "max_in_flight = true", "max_in_flight: expected a whole number"),
        ('next = "b"', 'next = "c"', "stages[0].next: no stage is named c"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, problem):
    (tmp_path / "p.toml").write_text(GOOD.replace(old, new))
    with pytest.raises(PipelineConfigError) as refused:
        load_pipeline(tmp_path / "p.toml")
    assert any(told.startswith(problem) for told in refused.value.problems)


def test_all_that_is_wrong_is_notified_at_once(tmp_path):
    (tmp_path / "p.toml").write_text(GOOD.replace("factory", "factry").replace("model_path", "x"))
    with pytest.raises(PipelineConfigError) as refused:
        load_pipeline(tmp_path / "p.toml")
    assert len(refused.value.problems) == 5  # one key, and of both stages one too many, one missing


@pytest.mark.parametrize(("text", "reason"), [("a = ", "not a TOML file"), (None, "No such file")])
def test_a_file_that_is_none_is_reported_with_its_path(tmp_path, text, reason):
    path = tmp_path / "p.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PipelineConfigError, match=reason) as refused:
        load_pipeline(path)
    assert str(path) in str(refused.value)


def test_stages_that_are_no_tables_are_reported(tmp_path):
    (tmp_path / "p.toml").write_text('name = "x"\nstages = ["a"]')
    with pytest.raises(PipelineConfigError, match=r"stages\[0\]: expected a table"):
        load_pipeline(tmp_path / "p.toml")
