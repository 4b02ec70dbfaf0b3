import os
import pty
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cli.top.keyboard import keys_at_once, keys_of


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B\x1bOC\x1b[D", ["up", "down", "right", "left"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["pageup", "pagedown", "home", "end"]),
        (b"\x03\x1b", ["ctrl-c", "escape"]),
        (b"\x1b[1;5A\x1b[200~jj", ["j", "j"]),
        ("é界d".encode(), ["d"]),
        (b"", []),
    ],
)
def test_bytes_are_keys(typed, keys):
    assert keys_of(typed) == keys


@given(st.binary(max_size=40))
def test_no_bytes_are_too_odd(typed):
    assert all(key.isprintable() for key in keys_of(typed))


def test_the_terminal_is_given_back_as_it_was():
    mine, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with keys_at_once(theirs):
        assert not termios.tcgetattr(theirs)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)
        os.write(mine, b"\x03")
        assert os.read(theirs, 10) == b"\x03"
    assert termios.tcgetattr(theirs) == before
    os.close(mine)
    os.close(theirs)


def test_what_is_no_terminal_is_an_oserror(tmp_path):
    with (tmp_path / "x").open("w") as file, pytest.raises(OSError), keys_at_once(file.fileno()):
        pass
