import tomllib

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.problem import locate, nearest_line

TEXT = '''\
# [not.a.table]
top.left = 1 # x = 2
"a.b" = """
[server]
port = 1 \\"""
""""
[server] # ]
port = 1
when = 1979-05-27 07:32:00
list = [ # ]
  "]", '[',
  { a = 1, b.c = [2] },
]
text = \'\'\'x'"""
[[workers]]\'\'\'
[[workers]]
url = "u#"

[[workers]]
  url = "v"
[workers.env]
K = "x"
[top.right]
k=2'''


def test_each_key_is_found_on_its_line():
    lines = locate(TEXT)
    assert lines[("top", "left")] == 2
    assert lines[("a.b",)] == 3
    assert lines[("server",)] == 7
    assert lines[("server", "port")] == 8
    assert lines[("server", "list", 0)] == lines[("server", "list", 1)] == 11
    assert lines[("server", "list", 2, "b", "c")] == 12
    assert lines[("server", "text")] == 14
    assert lines[("workers", 0)] == lines[("workers",)] == 16
    assert lines[("workers", 1)] == 19
    assert lines[("workers", 1, "url")] == 20
    assert lines[("workers", 1, "env", "K")] == 22
    assert lines[("top", "right", "k")] == 24


def test_a_missing_key_is_located_at_its_table():
    lines = locate("\n[server]\n")
    assert nearest_line(lines, ("server", "port")) == 2
    assert nearest_line(lines, ("health", "port")) is None


def test_windows_line_ends_count_once():
    assert locate("\r\n[server]\r\nport = 1\r\n")[("server", "port")] == 3


def paths(value, path=()):
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*path, index))


KEYS = st.sampled_from(["a", "b", "c-1", '"d.e"', "'f'", '"\\u0067"'])
NOISE = st.sampled_from(["", "# x = 1 ] }", "\t", "  # [a]"])
STRINGS = st.sampled_from(
    ['""', '"#"', '"\\""', "''", "'\\'", '"""\n[x]\n\\""" """""', "'''\n]'''''", '""""a"" """']
)
SCALARS = st.sampled_from(["1", "-1.5e3", "true", "1979-05-27T07:32:00Z", "1979-05-27 07:32:00"])


@st.composite
def lists(draw, inner):
    breaks = draw(st.sampled_from([" ", "\n", " # ] ,\n"]))
    values = draw(st.lists(inner, max_size=3))
    return "[" + breaks + (breaks + "," + breaks).join(values) + breaks + "]"


@st.composite
def inline_tables(draw, inner):
    pairs = [f"k{index} = {value}" for index, value in enumerate(draw(st.lists(inner, max_size=3)))]
    return "{ " + ", ".join(pairs) + " }"


VALUES = st.recursive(
    STRINGS | SCALARS, lambda inner: lists(inner) | inline_tables(inner), max_leaves=6
)
PAIRS = st.tuples(st.lists(KEYS, min_size=1, max_size=2).map(" . ".join), VALUES).map(" = ".join)
HEADERS = st.tuples(
    st.sampled_from(["[{}]", "[[{}]]", "[ {} ]"]), st.lists(KEYS, min_size=1, max_size=3)
).map(lambda header: header[0].format(".".join(header[1])))


@st.composite
def documents(draw):
    """A valid TOML text, and for each of its keys the lines of the part that contains it."""
    text, parts = "", {}
    for part in draw(st.lists(NOISE | HEADERS | PAIRS, max_size=12)):
        longer = text + draw(st.sampled_from(["", "  "])) + part + "\n"
        try:
            table = tomllib.loads(longer)
        except tomllib.TOMLDecodeError:
            continue
        span = range(text.count("\n") + 1, longer.count("\n") + 1)
        parts = {path: parts.get(path, span) for path in paths(table)}
        text = longer
    return text, parts


@given(documents())
def test_the_scanner_finds_the_keys_of_tomllib_and_their_lines(document):
    text, parts = document
    lines = locate(text)
    assert set(lines) == set(parts)
    assert all(lines[path] in span for path, span in parts.items())
