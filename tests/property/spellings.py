"""JSON in spellings, and with values, that profilers do not use."""

from __future__ import annotations

import re
from random import Random

_NUMBER = re.compile(rb"(?<=[:\[, ])-?\d+(?:\.\d+)?(?=[,}\]\s])")
_TEXT = re.compile(rb'"[^"\\]{1,60}"')
_BITS = (31, 41, 53, 61, 63, 64)
_NUMBERS = (
    *b"0 -0 -0.0 01 1. .5 +1 1e3 1E-3 0.0005 12.34567 7.0005 1.50000 -3.25 1e999 -1e999 NaN Infinity null".split(),
    *b'true [1] {} "7" "stream\\u00207" 2199023255552.001 2199023255553.5 1690000000000000.123'.split(),
    *b"1690000000000000.1234 2305843009213693.9 -2199023255553.5".split(),
    *(str(sign * (2**bits + more)).encode() for bits in _BITS for more in (-1, 0, 1) for sign in (1, -1)),
)
_TEXTS = (
    *rb'"" "\u0041" "\ud83d\ude00" "\ud800" "\n\t\\" "\x" "ts" "ph" "args" "X" "i" "s" "B" "E"'.split(),
    *rb'"kernel" "Kernel" "cpu_op" "[memory]" "\u005bmemory]" "ProfilerStep#3" null'.split(),
    *rb'7 "device" "External\u0020id"'.split(),
    *(
        b'"\xc3\xa9"',
        b'"\xff"',
        b'"\x01"',
        b'"\xed\xa0\x80"',
        b'"K\xe2\x84\xaa"',
        b'"graph node id"',
        b'"name":"a","name"',
    ),
)


def respelled(random: Random, text: bytes) -> bytes:
    """The text with some numbers and strings written in a way, or with a value, that profilers do not use."""
    for _ in range(random.choice((1, 1, 2, 5))):
        pattern, words = random.choice(((_NUMBER, _NUMBERS), (_TEXT, _TEXTS)))
        places = list(pattern.finditer(text))
        if places:
            place = random.choice(places)
            text = text[: place.start()] + random.choice(words) + text[place.end() :]
    if random.random() < 0.2:
        text = text.replace(b",", random.choice((b" ,", b",\n", b"\t,\r\n ")))
    return text
