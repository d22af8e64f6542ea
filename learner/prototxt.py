"""Protocol buffers' text format, in which Caffe's solver settings are written, read into plain values."""
import re
from functools import cache
from typing import Any

__all__ = ['parse_prototxt', 'Word']

tokens = r'''(?P<skip>\s+|\#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
                        |(?P<number>-?0[xX][0-9a-fA-F]+|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?f?(?!\w))|(?P<word>-?[A-Za-z_][\w.]*)
                        |(?P<sign>[:{}<>\[\],;])'''
escapes = {'n': '\n', 't': '\t', 'r': '\r'}
closing = {'{': '}', '<': '>'}


class Word(str): "A name without quotes, such as the value of an enum, `true` or `inf`"


def parse_prototxt(
    text: str,  # `name: value`, or `name { … }`; comments begin with `#`
) -> dict[str, list[Any]]:  # by name all values it is given, in order: texts, Words, numbers, and such dicts
    """Read a message in text format

    Raises: ValueError naming the line in which it is none."""
    reader = _Reader(text.removeprefix('\ufeff'))
    found = reader.message('')
    if reader.now: raise reader.error(f"`{reader.now[1]}` closes nothing")
    return found


@cache
def _compiled(): return re.compile(tokens, re.VERBOSE)  # not at import, which it would slow


class _Reader:
    "The tokens of a text, one after the other"
    def __init__(self, text):
        self.text, self.at, self.now, self.start = text, 0, None, 0
        self.next()

    def error(self, what):
        return ValueError(f"line {self.text.count(chr(10), 0, self.start)+1}: {what}")

    def next(self) -> Any:  # the token that was there; `now` is the one after it, or None at the end
        was = self.now
        while True:
            self.start = self.at
            if self.at == len(self.text):
                self.now = None
                return was
            found = _compiled().match(self.text, self.at)
            if not found: raise self.error(f"{self.text[self.at:self.at+20].splitlines()[0]!r} cannot be read")
            self.at = found.end()
            if found.lastgroup != 'skip':
                self.now = found.lastgroup, found[0]
                return was

    def takes(self, *signs) -> str:  # '' if none of them is there
        if not self.now or self.now[0] != 'sign' or self.now[1] not in signs: return ''
        return self.next()[1]

    def message(self, end) -> dict[str, list]:
        found: dict[str, list] = {}
        while self.now and not (end and self.now == ('sign', end)):
            if self.now[0] != 'word': raise self.error(f"a name should be here, not `{self.now[1]}`")
            name = self.next()[1]
            values = found.setdefault(name, [])
            colon, opened = self.takes(':'), self.takes('{', '<')
            if opened: values.append(self.inner(name, closing[opened]))
            elif not colon: raise self.error(f"`{name}` has no value: a colon should follow it")
            elif self.takes('['):
                while not self.takes(']'):
                    values.append(self.value(name))
                    self.takes(',')
            else: values.append(self.value(name))
            self.takes(',', ';')
        return found

    def inner(self, name, end):
        found = self.message(end)
        if not self.takes(end): raise self.error(f"`{name}` is not closed by `{end}`")
        return found

    def value(self, name) -> Any:
        if not self.now or self.now[0] == 'sign': raise self.error(f"`{name}` has no value")
        kind, text = self.next()
        if kind == 'number': return _number(text)
        if kind == 'word': return Word(text)
        parts = [text]
        while self.now and self.now[0] == 'text': parts.append(self.next()[1])  # they stand for one
        return ''.join(re.sub(r'\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)', _escaped, part[1:-1]) for part in parts)


def _number(text):
    if 'x' in text.lower(): return int(text, 16)
    if re.fullmatch(r'[-+]?0[0-7]+', text): return int(text, 8)
    return float(text.rstrip('f')) if re.search('[.eEf]', text) else int(text)


def _escaped(m) -> str:
    what = m[1]
    if what[0] == 'x' and len(what) > 1: return chr(int(what[1:], 16))
    return chr(int(what, 8)) if what[0] in '01234567' else escapes.get(what) or what
