"""Completion scripts for bash, zsh and fish.

PURE. All three work alike: the words so far name a page, the page says what may come. Each word is
quoted, whatever is in it. The workers of a running proxy they ask of `omni-proxy __complete`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    about: str
    takes: bool  # a value
    choices: tuple[str, ...] = ()
    file: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """What may follow the command of this name, as in "workers add"; "" is no command yet."""

    name: str
    about: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()
    files: bool = False
    workers: bool = False  # of the running proxy


_BASH_WORKERS: Final = """\
_omni_proxy_workers() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\\n' typed before=""
    typed=${line##* }
    # Where a colon ends a word, bash puts only what follows the last one in place of the typed.
    [[ $COMP_WORDBREAKS == *:* ]] && before=${typed%"${typed##*:}"}
    COMPREPLY=($("${1/#\\~/$HOME}" __complete "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    compopt +o filenames 2>/dev/null
    (( ${#COMPREPLY[@]} ))
}
"""
_ZSH_WORKERS: Final = """\
_omni_proxy_workers() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a found=(${(f)"$(_call_program workers $words[1] __complete ${(q)line} 2>/dev/null)"})
    (( $#found )) && compadd -- $found
}
"""
_FISH_WORKERS: Final = """\
function __omni_proxy_workers
    set -l words (commandline -opc)
    $words[1] __complete (commandline -cp) 2>/dev/null
end
"""


def bash(pages: Sequence[Page]) -> str:
    lines = [
        "# omni-proxy for bash: source this, or put it where bash-completion looks.",
        _BASH_WORKERS + "_omni_proxy() {",
        '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} page="" words=""',
        *_page_of_words("${COMP_WORDS[at]}", pages),
        "    COMPREPLY=()",
        '    case "$page:$prev" in',
        *(f"        {line}" for line in _bash_values(pages)),
        "    esac",
        '    case "$page" in',
    ]
    for page in pages:
        files = ' [[ $cur == -* ]] || COMPREPLY=($(compgen -f -- "$cur"));' if page.files else ""
        if page.workers:
            files = ' [[ $cur != -* ]] && _omni_proxy_workers "$1" && return 0;'
        lines.append(f"        {_quoted(page.name)}) words={_quoted(_all(page))};{files} ;;")
    lines += [
        "    esac",
        '    COMPREPLY+=($(compgen -W "$words" -- "$cur")) || return 0',
        "}",
        "complete -o filenames -F _omni_proxy omni-proxy",
    ]
    return "\n".join(lines) + "\n"


def _page_of_words(word: str, pages: Sequence[Page]) -> Iterator[str]:
    """Shell lines that leave the page's name in $page; `word` is that of number $at.

    A word counts once the next is typed. Flags may stand before the second name: bash cuts a URL
    into several words, so all that is neither a name nor a flag's value is passed over.
    """
    one, two, valued = ("|".join(map(_quoted, each or [""])) for each in _names(pages))
    yield "    local at=1"
    yield f'    (( COMP_CWORD > 1 )) && case "{word}" in {one}) page="{word}" ;; esac'
    yield "    for (( at = 2; at < COMP_CWORD; at++ )); do"
    yield f'        case "$page:{word}" in {valued}) (( at++ )); continue ;; esac'
    yield f'        case "$page {word}" in {two}) page="$page {word}"; break ;; esac'
    yield "    done"


def _names(pages: Sequence[Page]) -> tuple[list[str], list[str], list[str]]:
    """Those of one word, those of two, and PAGE:FLAG of what takes a value between the two."""
    two = [page.name for page in pages if " " in page.name]
    begun = {name.partition(" ")[0] for name in two}
    valued = [
        f"{page.name}:{name}"
        for page in pages
        if page.name in begun
        for flag in page.flags
        if flag.takes
        for name in flag.names
    ]
    return [page.name for page in pages if page.name and " " not in page.name], two, valued


def _bash_values(pages: Sequence[Page]) -> Iterator[str]:
    for page in pages:
        for flag in page.flags:
            if not flag.takes:
                continue
            pattern = "|".join(_quoted(f"{page.name}:{name}") for name in flag.names)
            reply = ""
            if flag.choices:
                reply = f' COMPREPLY=($(compgen -W {_quoted(" ".join(flag.choices))} -- "$cur"));'
            elif flag.file:
                reply = ' COMPREPLY=($(compgen -f -- "$cur"));'
            yield f"{pattern}){reply} return ;;"


def zsh(pages: Sequence[Page]) -> str:
    lines = [
        "#compdef omni-proxy",
        "# omni-proxy for zsh: as _omni-proxy in a folder of $fpath.",
        _ZSH_WORKERS + "_omni_proxy() {",
        '    local page="" prev=$words[CURRENT-1] COMP_CWORD=$((CURRENT-1))',
        "    local -a found",
        *_page_of_words("$words[at+1]", pages),
        '    case "$page:$prev" in',
    ]
    for page in pages:
        for flag in (flag for flag in page.flags if flag.takes):
            pattern = "|".join(_quoted(f"{page.name}:{name}") for name in flag.names)
            reply = f"compadd -- {_each(flag.choices)}" if flag.choices else ":"
            lines.append(f"        {pattern}) {'_files' if flag.file else reply}; return ;;")
    lines += ["    esac", '    case "$page" in']
    for page in pages:
        told = [
            f"{_colons(name)}:{_brief(flag.about)}" for flag in page.flags for name in flag.names
        ]
        files = " [[ $PREFIX == -* ]] || _files;" if page.files else ""
        if page.workers:
            files = " [[ $PREFIX == -* ]] || _omni_proxy_workers;"
        lines.append(f"        {_quoted(page.name)})")
        lines.append(f"            found=({_each(page.words)})")
        lines.append("            (( $#found )) && compadd -- $found")
        lines.append(f"            found=({_each(told)})")
        lines.append(f"            [[ $PREFIX == -* ]] && _describe flag found;{files} ;;")
    lines += [
        "    esac",
        "}",
        # Loaded from $fpath it is run; sourced it is made known.
        'if [[ $funcstack[1] == _omni-proxy ]]; then _omni_proxy "$@"',
        "else compdef _omni_proxy omni-proxy; fi",
    ]
    return "\n".join(lines) + "\n"


def fish(pages: Sequence[Page]) -> str:
    one, two, valued = map(_each, _names(pages))
    lines = [
        "# omni-proxy for fish: in ~/.config/fish/completions/omni-proxy.fish",
        _FISH_WORKERS + "function __omni_proxy_page",
        "    set -l words (commandline -opc)",
        '    set -l page ""',
        f'    contains -- "$words[2]" {one}; and set page "$words[2]"',
        "    set -l at 0",
        "    set -l value 0",
        "    for word in $words",
        "        set at (math $at + 1)",
        "        test $at -lt 3; and continue",
        "        if test $value = 1; set value 0; continue; end",
        f'        contains -- "$page:$word" {valued}; and set value 1',
        f'        contains -- "$page $word" {two}; and set page "$page $word"; and break',
        "    end",
        '    test "$page" = "$argv[1]"',
        "end",
        "complete -c omni-proxy -f",
    ]
    for page in pages:
        at = f"complete -c omni-proxy -n {_quoted(f'__omni_proxy_page {_quoted(page.name)}')}"
        if page.words:
            lines.append(f"{at} -a {_quoted(' '.join(page.words))}")
        if page.files:
            lines.append(f"{at} -F")
        if page.workers:
            lines.append(f"{at} -a '(__omni_proxy_workers)'")
        for flag in page.flags:
            value = " -x" if flag.takes else ""
            if flag.choices:
                value += f" -a {_quoted(' '.join(flag.choices))}"
            if flag.file:
                value = " -r -F"
            for name in flag.names:
                kind = "-l" if name.startswith("--") else "-s"
                word = _quoted(name.lstrip("-"))
                lines.append(f"{at} {kind} {word}{value} -d {_quoted(_brief(flag.about))}")
    return "\n".join(lines) + "\n"


def _all(page: Page) -> str:
    return " ".join((*page.words, *(name for flag in page.flags for name in flag.names)))


def _each(words: Sequence[str]) -> str:
    return " ".join(map(_quoted, words))


def _quoted(text: str) -> str:
    """In single quotes, as all three shells read them."""
    return "'" + text.replace("\\", "").replace("'", "'\\''") + "'"


def _colons(text: str) -> str:
    return text.replace(":", "\\:")


def _brief(about: str) -> str:
    return re.split(r"[;(]", about)[0].strip()


SHELLS: Final[dict[str, Callable[[Sequence[Page]], str]]] = {
    "bash": bash,
    "fish": fish,
    "zsh": zsh,
}
