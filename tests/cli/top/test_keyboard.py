import os
import pty
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cli.top.command import parse_keys, raw_keyboard
from omni_proxy.cli.top.view import Click


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B\x1bOC\x1b[D", ["up", "down", "right", "left"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["pageup", "pagedown", "home", "end"]),
        (b"\x03\x1b", ["ctrl-c", "escape"]),
        (b"\x1b[1;5A\x1b[200~jj", ["j", "j"]),
        ("é界d".encode(), ["d"]),
        (b" /\x7f\x08", ["space", "/", "backspace", "backspace"]),
        (b"\x1b[<0;12;5M\x1b[<0;12;5m\x1b[<4;1;1M", [Click(11, 4), Click(0, 0)]),
        (b"\x1b[<64;1;1M\x1b[<65;1;1M", ["wheelup", "wheeldown"]),
        (b"\x1b[<1;1;1M\x1b[<2;1;1M\x1b[<128;1;1M\x1b[<0;1M", []),
        (b"", []),
    ],
)
def test_bytes_are_parsed_as_keys(typed, keys):
    assert parse_keys(typed) == keys


@given(st.binary(max_size=40))
def test_any_bytes_can_be_parsed(typed):
    assert all(isinstance(key, Click) or key.isprintable() for key in parse_keys(typed))


def test_the_terminal_settings_are_restored():
    master, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    with raw_keyboard(terminal):
        assert not termios.tcgetattr(terminal)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)
        os.write(master, b"\x03")
        assert os.read(terminal, 10) == b"\x03"
    assert termios.tcgetattr(terminal) == before
    os.close(master)
    os.close(terminal)


def test_a_file_that_is_not_a_terminal_is_an_oserror(tmp_path):
    with (tmp_path / "x").open("w") as file, pytest.raises(OSError), raw_keyboard(file.fileno()):
        pass
