"""Triples (subject, relation, object) from English text by rule: what KID's knowledge trie is built from (KID 3.2).

The paper runs co-reference resolution and a neural OpenIE model. Here stand word lists and a few clause patterns:

* a sentence is cut into pieces at punctuation, and at conjunctions and relative pronouns that open a further clause;
* the first verb group of a piece parts its subject from its object; a piece without a subject takes that of the piece
  before ("is A and has B"), a relative clause the noun phrase before it, a pronoun the title or the last subject;
* a piece without a verb is a further object ("is A, B and C"), an apposition ("X, a painter, ...") or a circumstance;
* brackets are lifted out and said about the phrase before them ("enteroscopy (DBE)", "Night Visions (2012)");
* phrases between stopwords are the fallback: a sentence with two content words yields a triple, and each of its
  content words occurs in one.

Departure from the paper: beside (subject, relation, object), each phrase of an object is an object of its own, where a
decoder can enter a long object, and points back, as RELATED, to the subject and to the whole object, since a question
may name any end of a fact. A full OpenIE would add part-of-speech tags and dependency parses (verbs that look like
nouns, the attachment of phrases, nested clauses, negation and modality as attributes), confidences, and coreference
beyond title and last subject. Other scripts than English get the fallback only.
"""

import re
from itertools import pairwise
from typing import NamedTuple

from minikid import grammar
from minikid.grammar import CUT, Run, clauses, find_verb, one_name, tokenise, verb_group
from minikid.text import is_content, sentences, words

RELATED = "related to"

_QUOTES, _QUOTES_INSIDE = re.compile(r"[\"“”„«»]+"), re.compile(r"(?<=\w)[\"“”„«»]+(?=\w)")
_DISAMBIGUATION = re.compile(r"(?<=\w)\s*\([^()]*\)\s*$")  # "Night Visions (album)"
_BRACKETS = re.compile(r"\s*[(\[（【]([^()\[\]（）【】]*)[)\]）】]")
_SIGNS = "$€£<>=≤≥±~+#-", "%°′″+"  # before and behind the number that they belong to


class Triple(NamedTuple):
    """One fact; subject and object are runs of words as the text has them, without articles in front."""

    subject: str
    relation: str
    object: str


def extract_triples(text: str, title: str | None = None) -> list[Triple]:
    """The triples of a passage, in the order of the text, without repetitions (KID 3.2, A.2.1).

    A title other than a section heading ("RESULTS") is what pronouns mean where the sentence itself names nothing, and
    points to every subject. "A is B and it is C" gives (A, is, B) and (A, is, C) among others.
    """
    reader = _Reader(title)
    for sentence in sentences(text):
        reader.read(sentence)
    return list(reader.triples)


class _Reader:
    """What a passage has said so far: its triples (an ordered set), and who was spoken of last."""

    def __init__(self, title: str | None):
        named = title is not None and any(is_content(word) and word not in grammar.HEADINGS for word in words(title))
        self.title = self.last = " ".join(_DISAMBIGUATION.sub("", title).split()) if named else None
        self.triples: dict[Triple, None] = {}

    def read(self, sentence: str) -> None:
        """Adds one sentence: `subject` and `relation` are its latest clause's, `pending` waits for a subject."""
        self.text = " ".join(_QUOTES.sub("", _QUOTES_INSIDE.sub(" ", sentence)).split())
        self.subject, self.relation = None, ""
        self.pending: list[tuple[str, Run]] = []  # (relation if it has one, words)
        self.covered: set[str] = set()
        brackets = []
        while match := _BRACKETS.search(self.text):
            brackets.append((self.text[: match.start()], match[1]))
            glue = " " if self.text[match.end() : match.end() + 1].isalnum() else ""
            self.text = self.text[: match.start()] + glue + self.text[match.end() :]
        tokens = tokenise(self.text)
        pieces = clauses(self.text, tokens)
        for i, piece in enumerate(pieces):
            self._clause(piece, pieces[i - 1] if i else [], pieces[i + 1] if i + 1 < len(pieces) else [])
        for _, run in self.pending:
            self._fragment(run)
        phrases = self._phrases(tokens)  # the net under the patterns
        if not self.covered:
            for phrase in phrases[1:] or phrases:
                self._add(self._slice(phrases[0]), RELATED, self._slice(phrase))
        for phrase in phrases:
            if not self.covered.issuperset(words(self._slice(phrase))):
                self._fragment(phrase)
        self.last = self.subject or self.last
        anchor = self._slice(phrases[0]) if phrases else ""
        for before, inside in brackets:
            self.text = before
            named = self._phrases(tokenise(before))
            anchor = self._slice(named[-1]) if named else anchor
            self.text = inside
            self._fragment(tokenise(inside), anchor)
            anchor = anchor or self._slice(self._trim(tokenise(inside)))

    def _clause(self, piece: Run, before: Run, after: Run) -> None:
        """Subject, relation and object of one piece, or its place in the clauses around it."""
        lead = piece[0].word if piece[0].word in grammar.CLAUSE_WORDS else ""
        body = piece[1:] if lead else piece
        verb = find_verb(piece)
        if verb is None:
            if self.subject:
                self._fact(self.subject, self.relation, body)
            else:
                self._wait("", body)
            return
        verb -= len(piece) - len(body)
        end, start = verb_group(body, verb)
        relation, rest = self._slice(body[verb:start]), body[start:]
        subjects = self._subjects(body[:verb], lead, before)
        if not self._trim(rest) and after and after[0].word in ("that", "whether", "if"):
            rest = after[1:]  # "This suggests | that ..."
        if not self._trim(rest):  # "was reported": the verb itself is what is said
            relation, rest = self._slice(body[verb : end - 1]), body[end - 1 : end]
        if not subjects:
            if verb:
                self._fragment(body[verb:])  # "We studied ...", "There is ..."
            else:
                self._wait(relation, rest)  # "Compared to usual care, ..."
            return
        further = find_verb(rest) if lead in grammar.RELATIVES and not self.subject else None
        if further:
            rest, main = rest[:further], rest[further:]  # "Patients | who need blood | were moved"
        for subject in subjects:
            self._fact(subject, relation, rest)
        if further:
            return self._clause(main, rest, after)
        for circumstance, run in self.pending:
            self._fact(subjects[-1], circumstance or self._slice(body[verb:end]), run)
        self.pending = []
        if lead not in grammar.RELATIVES:
            self.subject, self.relation = subjects[-1], self._slice(body[verb:end])

    def _subjects(self, head: Run, lead: str, before: Run) -> list[str]:
        """Whom a clause is about, from the words before its verb; several for "A, B and C are ..."."""
        waiting = [run for relation, run in self.pending if not relation and run[0].word not in grammar.PREPOSITIONS]
        while head and (head[-1].word in grammar.ADVERBS or head[-1].word.endswith("ly")):
            head = head[:-1]
        if head and head[0].word in grammar.PREPOSITIONS and head[-1].word in grammar.PRONOUNS:  # "In 1995 he won"
            self._wait("", head[:-1])
            head = head[-1:]
        named = self._phrases(head)
        if named and head[0].word in grammar.PREPOSITIONS:  # "In the year 1995 Smith won"
            self._wait("", [token for token in head if token.end <= named[-1][0].start])
            return [self._slice(named[-1])]
        if named:
            listed = lead in ("and", "or") or any(token.word in ("and", "or") for token in head)
            names = [self._slice(self._trim(run)) for run in (waiting if listed else [])]
            self.pending = [(relation, run) for relation, run in self.pending if not (listed and run in waiting)]
            return [*names, self._slice(self._trim(head))]
        pronoun = next((token.word for token in reversed(head) if token.word in grammar.PRONOUNS), "")
        if lead in grammar.RELATIVES and not pronoun:
            return [self._slice(phrase) for phrase in self._phrases(before)[-1:]]
        if (
            not pronoun and not self.subject and waiting
        ):  # "X, a painter, was born": the rest of what waits is apposition
            self.pending = [(relation or "is", run) for relation, run in self.pending if run is not waiting[0]]
            return [self._slice(self._trim(waiting[0]))]
        antecedent = self.subject or (self.title if pronoun in grammar.THIRD_PERSON else None)
        if not antecedent and pronoun in grammar.THIRD_PERSON | grammar.POINTING:
            antecedent = self.last
        return [antecedent] if antecedent and pronoun not in grammar.SPEAKERS else []

    def _wait(self, relation: str, run: Run) -> None:
        if self._trim(run):
            self.pending.append((relation, run))

    def _fact(self, subject: str, relation: str, run: Run) -> None:
        """One fact, the phrases of its object as further objects, and the way back from each of them."""
        whole = self._trim(run)
        if not whole:
            return
        if run[0].word in grammar.PREPOSITIONS and relation:
            relation = f"{relation} {run[0].word}"
        self._add(subject, relation, self._slice(whole))
        for phrase in filter(_names_something, self._phrases(whole)):
            if len(phrase) > 1 or phrase[0].capital:
                self._add(subject, relation if phrase[0] == whole[0] else RELATED, self._slice(phrase))
            self._add(self._slice(phrase), RELATED, subject)
        self._relate(whole)
        if self.title:
            self._add(self.title, RELATED, subject)

    def _fragment(self, run: Run, bracketed_by: str = "") -> None:
        """A run of words without a subject: said of the one spoken of, or of the phrase whose bracket it fills."""
        whole = self._trim(run)
        latest = next((triple.subject for triple in reversed(self.triples)), "")
        others = (one for one in (bracketed_by, self.subject, self.last, latest) if one and one != self._slice(whole))
        anchor = next(others, "")
        if whole and anchor:
            self._add(anchor, RELATED, self._slice(whole))
        for phrase in filter(_names_something, self._phrases(whole) if bracketed_by else []):
            self._add(self._slice(phrase), RELATED, bracketed_by)
        self._relate(whole)

    def _relate(self, whole: Run) -> None:
        """From each phrase of a run to the whole; also to itself, so that a part of a name finds the whole name."""
        for phrase in filter(_names_something, self._phrases(whole) if len(whole) > 1 else []):
            self._add(self._slice(phrase), RELATED, self._slice(whole))

    def _add(self, subject: str, relation: str, object: str) -> None:
        if subject != object or len(words(subject)) > 1:
            self.triples.setdefault(Triple(subject, relation, object))
            self.covered.update(words(f"{subject} {relation} {object}"))

    def _slice(self, run: Run) -> str:
        """The text of a run, with the signs and the point of an abbreviation that touch it."""
        if not run:
            return ""
        start, end = run[0].start, run[-1].end
        while start and self.text[start - 1] in _SIGNS[0]:
            start -= 1
        while end < len(self.text) and self.text[end] in _SIGNS[1]:
            end += 1
        end += self.text[end : end + 1] == "." and "." in run[-1].word and not run[-1].word[0].isdigit()
        return self.text[start:end]

    def _trim(self, run: Run) -> Run:
        """The run from its first word that can open a noun phrase to its last that is no stopword; maybe empty."""
        last = max((i for i, token in enumerate(run) if not token.stop), default=-1)
        first = next((i for i, token in enumerate(run) if not (token.stop and token.word in grammar.NO_OPENING)), last)
        return run[max(0, min(first, last)) : last + 1]

    def _phrases(self, run: Run) -> list[Run]:
        """The stopword-delimited phrases of a run; a place or date keeps its one comma, a list is divided at each."""
        phrases: list[Run] = []
        for i, token in enumerate(run):
            before = run[i - 1] if i else None
            gap = self.text[before.end : token.start] if before else ""
            joined = before and not before.stop and not CUT.search(gap) and ("," not in gap or one_name(before, token))
            if joined and not token.stop:
                phrases[-1].append(token)
            elif not token.stop:
                phrases.append([token])
        return [part for phrase in phrases for part in self._list_items(phrase)]

    def _list_items(self, phrase: Run) -> list[Run]:
        commas = [i for i in range(1, len(phrase)) if "," in self.text[phrase[i - 1].end : phrase[i].start]]
        bounds = [0, *(commas if len(commas) > 1 else []), len(phrase)]
        return [phrase[a:b] for a, b in pairwise(bounds)]


def _names_something(phrase: Run) -> bool:
    """False for a lone number other than a year: nothing that a text would be asked about."""
    return len(phrase) > 1 or not phrase[0].word.isdigit() or len(phrase[0].word) == 4
