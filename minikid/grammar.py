"""English for the clause patterns of triples.py: word classes, the tokens of a sentence, and which of them is the verb.

Closed classes and the commonest verbs stand as word lists; the rest is told by form and neighbours, without a tagger.
"""

import re
from itertools import pairwise
from typing import NamedTuple

from minikid.text import STOPWORDS, stem, word_spans, words


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


BE = _set("is are was were am be been being isn't aren't wasn't weren't")
HAVE = _set("has have had having hasn't haven't hadn't")
MODALS = _set(
    """do does did can could will would may might shall should must cannot don't doesn't didn't can't couldn't won't
    wouldn't shouldn't"""
)
AUXILIARIES = BE | HAVE | MODALS
FINITE = AUXILIARIES - {"be", "been", "being", "having"}
DETERMINERS = _set("a an the this that these those his her its their our my your each every some any no another both")
THIRD_PERSON = _set("he she it they him them")
POINTING = _set("this these those that one both")
SPEAKERS = _set("i we you us me there what")  # pronouns that stand for nothing in the text
PRONOUNS = THIRD_PERSON | POINTING | SPEAKERS
PREPOSITIONS = _set(
    """of in on at by for from with to as into during between among about against over under after before through
    without within than per via near since until towards toward upon across like including despite along around"""
)
RELATIVES = _set("which who whom where whose that")
CLAUSE_WORDS = RELATIVES | _set("and but or while whereas although though because since when if so unless whether")
ADVERBS = _set(
    "not also often never still only then now always usually currently later first thus once both all ever together"
)
PLURALS = _set("they we i you people data women men children who which")
SINGULARS = _set("it he she this that who which")
# What a subject or an object does not open with; "more effective" and "not safe" keep their first word.
NO_OPENING = _set("a an the his her its their our my your also then thus") | PREPOSITIONS | CLAUSE_WORDS | AUXILIARIES
NO_OPENING |= PRONOUNS - {"one", "both"}
# Verbs by their stems, for the forms in -s and the plain form; forms in -ed need no list. The second list holds verbs
# that are as often nouns: they count only before a word that opens a noun phrase ("results in", "supports the").
VERBS = _set(
    """absorb accept achiev advis affect agre allow appear appli argu arrest arriv assess associ attend attract
    avoid becom begin believ belong bind borrow break breath bring build burn buy carri celebr choos circul
    climb collect combin commit communic compet compos compris conclud confirm connect conserv consid consist
    constitut consum contain continu contribut convert correspond creat decid defin deliv demonstr deni depend
    deriv describ destroy determin develop die differ digest disappear discov dissolv distinguish distribut
    disturb eat emerg employ enabl encourag enforc enjoy ensur enter erupt escap establish evalu evolv examin
    exceed excit exert exist expand expect explain express extend fail feed feel fill find fli float follow
    forbid freez generat get give go goe govern grow happen harm hear identifi impair impli improv includ indic
    inherit inhibit inject inspir interact interpret introduc invent investig involv join judg keep know lay
    learn leav let lie lift live lose lower maintain make meet melt migrat mix modifi move observ obtain occur
    oper origin owe pay perform possess predict prefer prepar prevent proceed promot protect prove provid
    publish pull push put rais reach react recal receiv recommend reduc refer reflect regul relat relax releas
    reli remain remind remov repair replac repres reproduc requir resist respond restor retain reveal rotat say
    see seem sell send separ serv shine sing sit slow solv speak split stay stimul strengthen stretch struggl
    suffer suggest surviv sustain swim take teach tell tend think throw translat transmit travel weaken wear
    weav weigh widen write"""
)
NOUN_VERBS = _set(
    """act address age aim attack attempt balanc base block branch bridg call cast catch caus chang charg chart
    circl claim coach combat compound conflict control cool count cover cross damag decay declin decreas design
    direct drain drink drop effect end estim face featur fight fish flow focus forc form function gain guard
    heat help hold host hunt impact increas influenc lack land last lead link list look mark mean measur mention
    name need offer open orbit own pass peak plan play present press process produc project pump rank record
    report result return rise rule run set share show signal sleep smell spin spread stand start state stop
    store strike studi support surround tast tie touch train trap treat trigger turn use vari vote walk warm
    wave win work yield"""
)
PAST = _set(
    """became began brought built came caught chose drew drove fell fought found gave got grew held kept knew
    led lost made meant met paid ran said sang sat saw sent showed sold spent spoke stood swam taught thought
    told took understood rose went won wore wrote underwent"""
)
PARTICIPLES = PAST | _set(
    """become begun born borne broken chosen come done drawn driven eaten fallen flown forgotten given gone
    grown hidden known left put run seen set shown spoken spread sung taken thrown undergone worn written cut
    hit"""
)
HEADINGS = _set(  # of structured abstracts: titles that name no subject
    """abstract aim aims background conclusion conclusions context design discussion findings intervention interventions
    introduction main material materials measure measures method methods objective objectives outcome outcomes
    participants patients purpose results setting study summary"""
)

_SINGULAR_ENDS = ("'s", "ss", "us", "is")
_NO_SUBJECT = ("to", "than", "as")  # an auxiliary after these has none: "to have", "than did"
CUT = re.compile(r"[;:，、；：。！？…–—()\[\]（）【】]|\s-+\s")  # ends a clause; a comma only sometimes does
_LONGEST = 60  # tokens of a piece: no clause is longer, and text without punctuation stays cheap
_INSIDE = re.compile(
    r"[^\s,;，、；：。！？…–—()\[\]（）【】]*"
)  # what may stand in a token: "off-schedule", "a/b", "1:2"


class Token(NamedTuple):
    """A blank-separated word of a sentence, hyphens and all."""

    word: str  # in small letters
    start: int
    end: int
    stop: bool  # made of stopwords only
    capital: bool  # begins with anything but a small letter


Run = list[Token]


def tokenise(sentence: str) -> Run:
    spans: list[list[int]] = []
    for start, end in word_spans(sentence):
        if spans and _INSIDE.fullmatch(sentence, spans[-1][1], start):
            spans[-1][1] = end
        else:
            spans.append([start, end])
    tokens = []
    for start, end in spans:
        run = sentence[start:end]
        name = start > 0 and run[0].isupper() and run != "I"  # "Year In Rock", "The Who"
        stop = STOPWORDS.issuperset(words(run)) and not name
        tokens.append(Token(run.lower().replace("’", "'"), start, end, stop, not run[0].islower()))
    return tokens


def one_name(before: Token, token: Token) -> bool:
    """Whether a comma between the two stays inside a name, place, date or list: "Las Vegas, Nevada", "May 1, 1592"."""
    names = before.capital and token.capital and not before.stop and not token.stop
    return names and not before.word.endswith("ly") and (token.word[0].isdigit() or not before.word[0].isdigit())


def clauses(text: str, tokens: Run) -> list[Run]:
    """Cuts at punctuation and before the words that open a further clause; such a word stays, as the first."""
    segments: list[Run] = [[]]
    for token in tokens:
        left = segments[-1]
        gap = text[left[-1].end : token.start] if left else ""
        if (
            len(left) == _LONGEST
            or CUT.search(gap)
            or ("," in gap and (left[0].word in PREPOSITIONS or not one_name(left[-1], token)))
        ):
            segments.append([])
        segments[-1].append(token)
    pieces: list[Run] = []
    for segment in segments:
        pieces.append([])
        for i, token in enumerate(segment):
            left = pieces[-1]
            if left and token.word in CLAUSE_WORDS and left[-1].word not in PREPOSITIONS:
                verb = find_verb(segment[i:])
                further = token.word in RELATIVES or find_verb(left) is not None
                if verb is not None and further and not _only_joins(segment[i : i + verb]):
                    pieces.append([])
            pieces[-1].append(token)
    return [piece for piece in pieces if piece]


def _only_joins(run: Run) -> bool:
    """Whether a conjunction, the first of a run that a verb follows, only joins nouns: "in 2013 and 2017 and named"."""
    return run[0].word in ("and", "or") and any(token.word in ("and", "or") for token in run[1:])


def _is_verb(run: Run, i: int) -> bool:
    """Whether token i is the finite verb of its piece, or a participle in its place ("followed by ...")."""
    word, rest = run[i].word, run[i + 1 :]
    earlier = [token for token in run[:i] if token.word not in ADVERBS and not token.word.endswith("ly")]
    subject = earlier[-1] if earlier else None
    before = subject.word if subject else ""
    if i and run[i].capital:
        return False  # "May", "Will"
    if word in FINITE:
        return not i or run[i - 1].word not in _NO_SUBJECT
    if before in PREPOSITIONS or before in DETERMINERS - POINTING or "-" in word:
        return False
    if word in PAST:
        return i > 0
    clause = run[i : next((j for j in range(i + 1, len(run)) if run[j].word in CLAUSE_WORDS), len(run))]
    later = any(
        token.word in FINITE and not token.capital and last.word not in _NO_SUBJECT for last, token in pairwise(clause)
    )
    if (word.endswith("ed") and len(word) > 4) or (i == 0 and word.endswith("ing") and len(word) > 5):
        name = i == 0 and run[i].capital and any(_looks_finite(token) for token in rest)  # "Rolling Stone named ..."
        return (before in RELATIVES or not later) and not name and "-" not in before  # "women recruited here were ..."
    following = next((token for token in rest if token.word not in ADVERBS), None)
    if following is None or following.word == "of" or following.word in AUXILIARIES or word.endswith(("ing", "ss")):
        return False
    opens = rest[0].capital or rest[0].word.endswith("ly") or (rest[0].stop and rest[0].word not in CLAUSE_WORDS)
    clear, unclear = stem(word) in VERBS, stem(word) in NOUN_VERBS and opens
    if word.endswith("s"):
        if subject is None:
            return clear and not run[i].capital  # "... and refers to"
        singular = subject.capital or before in SINGULARS or not before.endswith("s") or before.endswith(_SINGULAR_ENDS)
        return singular and (clear or (unclear and not any(_looks_finite(token) for token in rest)))
    both = any(token.word == "and" for token in earlier)  # "cannabis and alcohol impair"
    plural = both or before in PLURALS or (before.endswith("s") and not before.endswith(_SINGULAR_ENDS))
    noun = word.endswith(("ion", "ment", "ance", "ence")) or (word.endswith(("er", "or")) and stem(word) != word)
    return plural and not noun and (clear or unclear)


def _looks_finite(token: Token) -> bool:
    word = token.word
    return word in FINITE or word in PAST or word.endswith("ed") or stem(word) in VERBS


def find_verb(run: Run) -> int | None:
    """Index of the first verb of a piece, which may begin with the word that opens its clause."""
    return next((i for i in range(len(run)) if _is_verb(run, i)), None)


def verb_group(run: Run, first: int) -> tuple[int, int]:
    """Ends (exclusive) of the verb group that begins at `first`, without and with its preposition."""
    end, helper = first + 1, run[first].word
    for i in range(first + 1, len(run)):
        word = run[i].word
        participle = word.endswith(("ed", "ing") if helper in BE else "ed") or word in PARTICIPLES
        plain = helper in MODALS and not run[i].stop and not word.endswith("ly")
        if helper not in AUXILIARIES:
            break
        if word in AUXILIARIES or (participle and "-" not in word) or plain:
            helper, end = word, i + 1
        elif word == "not":
            end = i + 1
        elif word not in ADVERBS and not word.endswith("ly"):
            break
    if end + 1 < len(run) and run[end].word == "to" and stem(run[end + 1].word) in VERBS | NOUN_VERBS | AUXILIARIES:
        return end + 2, end + 2  # "is used to treat"
    return end, end + (end < len(run) and run[end].word in PREPOSITIONS)
