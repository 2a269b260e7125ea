"""Verbs and fragments in docstrings, by a list of the code's verbs and the endings of English.

A word that is a noun as often as a verb (`plan`, `runs`) is a verb here only where its place says so: as the
first word of a sentence in its base form, or with the ending of a participle.
"""

import re
from collections.abc import Iterator
from itertools import pairwise


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Verbs whose forms are hardly ever nouns in this field.
VERBS = _words(
    """
    accept act add adopt agree allow announce append apply arrive ask assign assume attach avoid become
    begin believe belong bind bring broadcast build carry catch choose clear close collect come compare
    compile complete compute confirm connect consist consume contain continue convert correct create crop
    deadlock decide declare decode defer delete deliver depend derive describe destroy differ discard
    divide do draw drop enable encode enter enumerate evaluate exceed exclude execute exist expect explain
    extend extrapolate fetch fill find finish fit follow forbid forget freeze gain gather get give go grow
    guess happen have hear hide hold ignore imply improve include inherit insert install intercept
    interrupt invert join keep kill know lack lay learn leave let lie live locate look lose make meet mend
    merge minimise minimize move multiply need obey occur open outlive own parse participate pass permute
    predict prepare prevent proceed propose prove publish put quarantine raise reach read receive
    recompute reconstruct redirect reduce refer refuse register rehearse relax release rely remain
    remember remove rename render renew repair repeat replace require resolve respect restore resume
    return rise save say scan scatter see seem select send serve set settle shorten show shrink shut
    silence simulate sit sleep solve sort spawn spend spoil stand start stay stop strike strip suffice
    suggest suspend take tell tend terminate train transpose travel try undo unite unpack update use
    verify wait walk want warn wrap write yield
    """
)
# Nouns of this field that are verbs as well.
NOUN_VERBS = _words(
    """
    answer bar bound call change check claim copy cost count cover cross cut date delay document drift
    edit end exit export fault flag fork format free gate group guard halve hand handle import index key
    kick launch lead level limit line link list load lock log lower map mark mask match mean measure
    mirror name nest note number offer order page pair pause pick place plan play point poll post price
    print probe profile prompt queue rank rate record reply report request reset result round rule run
    sample schedule score search seed shard share shift signal slice space split stage state step store
    sum switch tag test time trace track transfer treat trial tune turn twist value vary view wake watch
    weigh work
    """
)
FINITE = _words(
    """
    am are began came can cannot chose cost could did does fell found gave got grew had has have held is
    kept knew led left lost made may met might must put ran said saw sent shall should showed stood told
    took was went were will would wrote
    """
)
IRREGULAR_PARTICIPLES = _words(
    """
    begun bound built chosen come done drawn found given gone got grown held kept known laid led left lost
    made meant met put read run said seen sent set shown spent stood taken told written
    """
)
# A sentence that begins so, and has no finite verb, is a fragment: a reader asks what is done with it.
FRAGMENT_STARTS = _words(
    """
    after also as at before behind beside besides by for from if in into like of on once outside since
    through to under unless until when where while with without
    """
)
STOP_WORDS = _words(
    """
    a all an and any are as at be by every for from given has have in is it its of on one or own that the
    their this those to what whether which with
    """
)


_BEFORE_A_BASE_FORM = frozenset({"that", "they", "to", "which", "who"})
_BEFORE_AN_S_FORM = frozenset({"that", "which", "who"})


def words_of(text: str) -> list[str]:
    """The words of a text in lower case; a span of code is the word `x`."""
    return re.findall(r"[a-z][a-z'-]*", _without_code(text).lower())


def _without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", "x", text)


def sentences_of(text: str) -> list[str]:
    """The parts of a docstring between full stops, colons, semicolons and blank lines."""
    parts = re.split(r"(?<=[.:;?!])\s+|\n\n", _without_code(text))
    return [part.strip() for part in parts if part.strip()]


def _stems(word: str, endings: tuple[str, ...]) -> Iterator[str]:
    """The base forms of which `endings` may have made a word."""
    for ending in endings:
        if not word.endswith(ending) or len(word) - len(ending) < 2:
            continue
        stem = word.removesuffix(ending)
        yield from (stem, f"{stem}e")
        if stem[-1:] == stem[-2:-1]:
            yield stem[:-1]
        if stem.endswith("i"):
            yield f"{stem[:-1]}y"


def is_finite(word: str) -> bool:
    """Whether a word is a verb that has a subject: `is`, `waits`, `took`."""
    return word in FINITE or any(stem in VERBS for stem in _stems(word, ("s", "es")))


def is_participle(word: str) -> bool:
    """Whether a word is a participle: `measured`, `running`, `taken`."""
    regular = any(stem in VERBS | NOUN_VERBS for stem in _stems(word, ("ed", "ing")))
    return regular or word in IRREGULAR_PARTICIPLES


def is_imperative(sentence: str) -> bool:
    """Whether a sentence begins with the base form of a verb."""
    words = words_of(sentence)
    return bool(words) and words[0] in VERBS | NOUN_VERBS


def has_clause(text: str) -> bool:
    """Whether a sentence of a text is imperative, or has a verb with its subject."""
    return any(
        is_imperative(sentence) or any(map(is_finite, words_of(sentence))) for sentence in sentences_of(text)
    )


def has_verb(text: str) -> bool:
    """Whether a text has a verb in any form."""
    words = words_of(text)
    if has_clause(text) or VERBS.intersection(words) or any(map(is_participle, words)):
        return True
    if any(map(_is_predicate, sentences_of(text))):
        return True
    return any(
        (before in _BEFORE_A_BASE_FORM and word in NOUN_VERBS)
        or (before in _BEFORE_AN_S_FORM and _is_s_form(word))
        for before, word in pairwise(words)
    )


def _is_s_form(word: str) -> bool:
    return any(stem in NOUN_VERBS for stem in _stems(word, ("s", "es")))


def _is_predicate(sentence: str) -> bool:
    """Whether a sentence says what its subject, named before, does: "Ranks plans", not "Ranks of a group"."""
    first, *rest = words_of(sentence) or [""]
    return _is_s_form(first) and bool(rest) and rest[0] not in FRAGMENT_STARTS | {"and"}


def is_fragment(sentence: str) -> bool:
    """Whether a sentence begins in the middle of a thought, such as "As the other one, faster."."""
    words = words_of(sentence)
    return (
        words[:1] != []
        and words[0] in FRAGMENT_STARTS
        and not (VERBS.intersection(words) or any(map(is_finite, words)))
    )


def num_content_words(text: str) -> int:
    """The number of words that are neither articles, pronouns and prepositions nor forms of be and have."""
    return sum(word not in STOP_WORDS for word in words_of(text))


def repeats(text: str, *names: str) -> bool:
    """Whether a docstring has no word beside those of the names that it documents."""
    known = {_root(word) for name in names for word in re.findall(r"[A-Za-z][a-z]*", name)}
    said = {_root(word) for word in re.findall(r"[a-z]+|\d+", text.lower()) if word not in STOP_WORDS}
    return said <= known


def _root(word: str) -> str:
    """A word without its ending, so that `planned` and `plans` are alike."""
    return re.sub(r"(?:ing|ed|es|s|er|e)$", "", word.lower())[:6]
