"""Nothing is decided by the text of a message, and every lock is taken by somebody."""

from __future__ import annotations

import io
import re
import tokenize

import pytest

from tests.tidy.tree import ROOT, ident, sources


def locks_nobody_takes(text: str) -> set[str]:
    """Names of attributes that hold a lock which the file never enters or acquires: a promise that
    is not kept."""
    made = set(re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?=\s*(?:threading\.)?R?Lock\(\)", text))
    entered = re.findall(
        r"\bwith\s+(?:[\w\[\]()]+\.)*(\w+)(?:\s+as\s+\w+)?\s*[:,]", text
    ) + re.findall(r"\.(\w+)\.acquire\(", text)
    return made - set(entered)


def test_every_lock_is_taken_by_somebody() -> None:
    product = [
        p
        for p in sources(".py", ".pyx")
        if {"python", "kdirect_spark"} & set(p.relative_to(ROOT).parts)
    ]
    assert {
        ident(path): names for path in product if (names := locks_nobody_takes(path.read_text()))
    } == {}


def test_a_lock_that_nobody_takes_is_found() -> None:
    made = (
        "self._a = threading.Lock()\nself.b: RLock = threading.RLock()\n"
        "self._c = threading.Lock()\nself._d = Lock()\n"
    )
    assert locks_nobody_takes(made) == {"_a", "b", "_c", "_d"}
    assert locks_nobody_takes(
        made + "with self._a:\n    pass\nwith state.b, other:\n    x._c.acquire()\n"
    ) == {"_d"}


# Where text for people stands.  As an attribute of anything; as a name of its own; as what an
# exception prints.
_ATTRIBUTE = (
    r"(?:\w+(?: \[ [^\]]* \]| \( \))? \. )+"
    r"(?:message|why|reason|hint|text|fault|broken|strerror|args)"
)
_PRINTED = r"(?:str|repr) \( (?:\w+ \. )*(?:e|err|error|exc|exception|cause|why|reason) \)"
_PEOPLES_TEXT = rf"(?:\b{_ATTRIBUTE}\b|\b(?:message|why|reason|hint|fault)\b|\b{_PRINTED})"
_CHANGED = r"(?: \. (?:lower|upper|strip|casefold) \( \)| \[ [^\]]* \])*"


def logical_lines(text: str) -> list[tuple[int, str]]:
    """(number, statement) of Python or Cython source: tokens with one space between them, every
    string as `S`, no comments, and the name of a constant that is a string as `S` too."""
    lines: list[tuple[int, str]] = []
    words: list[str] = []
    first = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if kind in ("NEWLINE", "ENDMARKER"):
            if words:
                lines.append((first, " ".join(words)))
            words = []
        elif kind in ("STRING", "FSTRING_END") and depth == 0:
            words.append("S")
        elif kind in ("NAME", "NUMBER", "OP", "ERRORTOKEN") and depth == 0 and token.string.strip():
            words.append(token.string)
        if len(words) == 1:
            first = token.start[0]
    constants = {
        m[1] for _, line in lines if (m := re.fullmatch(r"([A-Z_]\w*)(?: : [\w .]+)? = S", line))
    }
    if not constants:
        return lines
    named = re.compile(rf"(?<!\. )\b(?:{'|'.join(sorted(constants))})\b")
    return [(number, named.sub("S", line)) for number, line in lines]


def decisions_by_text(text: str) -> list[int]:
    """Lines of Python or Cython source that decide something by text that is meant for people: a
    message, a reason, what an exception prints.  Who rewords it would break them."""
    people, changed = _PEOPLES_TEXT, _CHANGED
    patterns = [
        rf"\bS (?:not )?in {people}",
        rf"(?<!\bfor )\b\w+ (?:not )?in (?:{_ATTRIBUTE}\b|{_PRINTED})",
        rf"{people}{changed} (?:==|!=) S\b",
        rf"\bS (?:==|!=) {people}",
        rf"{people}{changed} (?:not )?in [(\[{{] S\b",
        rf"{people}{changed} \. (?:startswith|endswith|find|rfind|index|count) \(",
        rf"\bre \. (?:search|match|fullmatch|findall|finditer) \( .*{people}",
        rf"^match {people}{changed} :",
        rf"\b(?:match|search|fullmatch) \( {people}{changed} \)",
    ]
    found = re.compile("|".join(patterns))
    return [number for number, line in logical_lines(text) if found.search(line)]


PLANTED = (
    'if "no more" in head.why:',
    'code = A if "collides" in e.message else B',
    'if reason == "disconnected":',
    'if reason != "disconnected" and ready:',
    'if "disconnected" == self.reason:',
    'level = DEBUG if reason in ("disconnected", "closed") else WARNING',
    'elif "timed out" not in str(e):',
    "if word in str(error):",
    "return any(word in e.message for word in WORDS)",
    'if e.args[0] == "gone":',
    'if e.message.lower().startswith("no room"):',
    'while not peer.fault.endswith("gone"):',
    'if re.search("no more", str(e)):',
    'if re.match(r"(a|b)", head.why):',
    "if WORDS.search(e.message):",
    'if e.strerror == "No space left on device":',
    'DISCONNECTED = "disconnected"\nif reason == DISCONNECTED:',
    'match e.message:\n    case "gone":\n        pass',
    'if e.message == f"{tp} is gone":',
    'if (\n    ready\n    and "gone"\n    in e.hint\n):',
    'cdef int f(head):\n    if "no more" in head.why: return <int> 1\n'
    '    return (<Head> head).why == "gone"',
)
INNOCENT = (
    "if head.why is AbortReason.NO_ROOM:",
    "if reason is CutReason.DISCONNECTED:",
    "if e.code == ErrorCode.NOT_LEADER_OR_FOLLOWER:",
    "if e.errno in (errno.ENOSPC, errno.EDQUOT):",
    'return f"{e.message}; {e.hint}" if e.hint else e.message',
    'raise ConfigError(f"{name}: {e.message}", hint=e.hint or "use transport=tcp") from e',
    "for part in e.args:",
    'if "reason" in settings:',
    '"""Whether "gone" in e.message, or reason == "gone"."""',
    '# if "gone" in e.message:',
    "text = \"if reason == 'gone'\"",
    'log.warning("it is cut: %s", reason)',
    'if transport == "tcp" and why:',
    "cdef inline int f(const uint8_t* p) noexcept nogil:\n    return <int> p[0]",
)


@pytest.mark.parametrize("source", PLANTED)
def test_the_finder_finds_a_decision_by_text(source: str) -> None:
    assert decisions_by_text(source + "\n"), logical_lines(source + "\n")


@pytest.mark.parametrize("source", INNOCENT)
def test_the_finder_leaves_the_innocent_alone(source: str) -> None:
    assert not decisions_by_text(source + "\n"), logical_lines(source + "\n")


def test_the_finder_names_the_line() -> None:
    assert decisions_by_text(
        'import os\n\n\ndef f(e):\n    """A word."""\n'
        '    return (\n        "gone" in e.message\n    )\n'
    ) == [6]


def test_nothing_is_decided_by_the_text_of_a_message() -> None:
    found = []
    for path in sources(".py", ".pyx", ".pxd"):
        if "tests" not in path.relative_to(ROOT).parts:
            text = path.read_text()
            found += [
                f"{ident(path)}:{n}: {text.splitlines()[n - 1].strip()}"
                for n in decisions_by_text(text)
            ]
    assert not found, "use an enum, an error's class or its code:\n" + "\n".join(found)
