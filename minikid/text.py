"""Sentences, words and stems: the text level that knowledge, retrieval and scoring share.

English rules in plain regular expressions, and PyStemmer for the stems. Other scripts are carried along: an ideograph
or a kana sign is a word of its own, ideographic full stops end sentences, and what Snowball does not know it leaves.
"""

import functools
import re
import unicodedata

import Stemmer

# Words without content of their own: they delimit phrases, and are keys of a trie only where there is nothing else.
STOPWORDS = frozenset(
    """a about above across after again against all almost along already also although always am among amongst an and
    any are aren't around as at away back be became because become becomes been before behind being below beneath
    beside besides between beyond both but by can can't cannot could couldn't despite did didn't do does doesn't
    doing don't done down due during each either else enough etc even ever every except few for from further
    furthermore had hadn't has hasn't have haven't having he he's hence her here hers herself him himself his how
    however i i'm if in indeed inside instead into is isn't it it's its itself just least less let like many may
    me meanwhile might mine more moreover most much must my myself near neither nevertheless no none nor not
    nothing now of off often on once one only onto or other others otherwise our ours ourselves out outside over
    own per perhaps prior quite rather same several shall she she's should shouldn't since so some such than that that's
    the their theirs them themselves then there there's thereby therefore these they they're this those though
    through throughout thus to together too toward towards under unless unlike until up upon us versus very via vs
    was wasn't we we're well were weren't what when whenever where whereas whether which while who whoever whole
    whom whose why will with within without won't would wouldn't yet you you're your yours yourself e.g i.e""".split()
)

# Abbreviations that a name or a further word follows: never a sentence end.
_TITLES = frozenset(
    "dr mr mrs ms mx prof gen col maj sen rep gov capt lt sgt cpl cmdr adm rev hon pres st mt ft messrs vs v cf viz al "
    "approx ca e.g i.e".split()
)
# Abbreviations that a number follows; "The answer is no. It ..." is still two sentences.
_NUMBERED = frozenset(
    "no nos fig figs vol vols p pp sec eq eqs ref refs tab jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
# Abbreviations that may close a sentence; the next word decides. Dotted ones ("U.S.", "Ph.D.") are found by their form.
_OPEN_ENDED = frozenset("etc jr sr inc ltd co corp dept univ assn bros ave blvd esq est".split())
# Words that, with a capital, almost always open a sentence.
_STARTERS = frozenset(
    """a about according after all also although among an and another are as at because before both but by during
    each for from furthermore had has have he her here his how however i if in is it its many more moreover most
    no nor not of on one our she since so some such that the their then there therefore these they this those thus
    to two under until was we were what when where which while who why with you your""".split()
)

_CLOSERS = "\"'”’»)]}」』）】》"
_OPENERS = "\"'“‘«([{「『（【《"
_BREAK = re.compile(rf"(?:[。！？｡]+|(?P<latin>[.!?…]+))[{re.escape(_CLOSERS)}]*|[\n\r\u2028\u2029]+")
_DOTTED = re.compile(r"(?:[^\W\d_]{1,3}\.)+[^\W\d_]{1,3}|[^\W\d_]")  # initials, dotted abbreviations
_FORGOTTEN_SPACE = re.compile(r"[a-z]{3}\.[A-Z]")
_LAST_WORD = re.compile(r"[^\s([{\"“‘«]*\Z")

_IDEOGRAPHS = (
    "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
)
_MARKS = "\u0300-\u036f\u0483-\u0487\u0591-\u05c7\u064b-\u065f\u0900-\u0903\u093a-\u094f\u0e31-\u0e3a\u0e47-\u0e4e"
_LETTER = rf"(?:(?![{_IDEOGRAPHS}])[^\W_])"  # letters and digits, ideographs apart
_RUN = rf"{_LETTER}(?:{_LETTER}|[{_MARKS}])*"
# A point between letters joins ("U.S", "node.js") unless a space seems forgotten ("was safe.The next").
_WORD = re.compile(
    rf"[{_IDEOGRAPHS}][\u3099\u309a]*|{_RUN}(?:(?:['’]|\.(?!(?<=[a-z]{{3}}\.)[A-Z])|(?<=\d),(?=\d)){_RUN})*"
)
WORD_JOINERS = "'’.,"  # characters that stand inside a word when word characters are on both sides


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Character spans of the sentences, in order, without surrounding white space; only white space lies between them.

    A line break ends a sentence. Full stops inside numbers, addresses, abbreviations and initials do not, nor does any
    mark that a small letter follows. A doubtful abbreviation ("in the U.S.") ends its sentence if "The" or the like
    comes next. Rules of this kind err both ways, but only where the writer's own marks are ambiguous.
    """
    spans, start = [], 0
    for match in _BREAK.finditer(text):
        if match["latin"] is None or _ends_sentence(text, start, match):
            spans.append((start, match.end()))
            start = match.end()
    spans.append((start, len(text)))
    return [stripped for span in spans if (stripped := _strip(text, *span))]


def sentences(text: str) -> list[str]:
    """The sentences of the text, in order; their words are the words of the text, none lost and none changed."""
    return [text[start:end] for start, end in sentence_spans(text)]


def word_spans(text: str) -> list[tuple[int, int]]:
    """Character spans of the words; hyphens and slashes divide, apostrophes and points inside a word do not."""
    return [match.span() for match in _WORD.finditer(text)]


def words(text: str) -> list[str]:
    """Lower-case words of the text in order, in composed form (NFC), apostrophes straight, ideographs one by one."""
    normal = unicodedata.normalize("NFC", text).replace("’", "'")
    return [word.lower() for word in _WORD.findall(normal)]


@functools.lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """Snowball's English stem of one lower-case word ("driving" -> "drive"); a stem's own stem may be shorter still.

    Each miss of the cache makes a stemmer of its own, because a PyStemmer object must not be shared between threads.
    """
    return Stemmer.Stemmer("english", 0).stemWord(word)


def is_content(word: str) -> bool:
    """Whether a lower-case word says something by itself: no stopword, and not digits alone."""
    return word not in STOPWORDS and any(character.isalpha() for character in word)


def _strip(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The span without white space at its ends, or None where nothing is left."""
    inner = text[start:end]
    begin = start + len(inner) - len(inner.lstrip())
    return (begin, begin + len(inner.strip())) if inner.strip() else None


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether the Latin end marks found at `match` close the sentence that began at `start`."""
    rest = text[match.end() : match.end() + 80]
    if rest and not rest[0].isspace():
        return bool(_FORGOTTEN_SPACE.match(text, max(start, match.start() - 3)))
    following = rest.lstrip().lstrip(_OPENERS)
    if not following:
        return True
    if following[0].islower():
        return False
    if match["latin"] != ".":
        return True
    before = _LAST_WORD.search(text[max(start, match.start() - 40) : match.start()])[0]
    if re.fullmatch(r"[(]?(\d{1,3}|[A-Za-z])", text[start : match.start()].strip()):
        return False  # "1. First point", "B. Second point", and an initial that opens the sentence
    abbreviation = before.lower()
    if abbreviation in _TITLES:
        return False
    if abbreviation in _NUMBERED:
        return not following[0].isdigit()
    if abbreviation in _OPEN_ENDED or _DOTTED.fullmatch(before):
        next_word = re.match(r"[\w'’]+(?!\.)|", following)[0]  # an initial ("J. A. Smith") is no starter
        return next_word.lower() in _STARTERS
    return True
