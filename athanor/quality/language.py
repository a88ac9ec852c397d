"""Known words: the language gate (is this text English?) and the set phrases of web pages.

English is judged by the share of ASCII characters and by function words: an English text
is full of English ones and has more of them than of any other language's. Six
languages that share the alphabet are told apart; scripts that do not are
caught by the ASCII share. It is a gate for English and no identifier of
languages, and it gives short texts the benefit of the doubt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from athanor.words.words import Words, prefix_sums, splitmix64, word_hashes

_TABLE = np.uint64(48)  # leaves 16 bits
JUDGED_WORDS = 20  # fewer words than this say too little about a text

ENGLISH = (
    "a about after all also an and any are as at be because been before between both but by can could did "
    "do does each for from had has have he her here his how i if in into is it its just like may more "
    "most must my no not of on one only or other our out over s she should so some such than that the "
    "their them then there these they this those through to under until up was we were what when where "
    "which while who will with would you your"
)
# Words that English has too (die, in, on, no, a, ...) are left out.
OTHERS = {
    "german": (
        "aber als auch auf aus bei dann das dass dem den der des durch ein eine einem einen einer eines er es "
        "für gegen hat ich ihr ist kann mit nach nicht noch nur oder sein sich sie sind über um und uns unter "
        "von vor wenn werden wie wird zu zum zur"
    ),
    "french": (
        "au aux avec ce ces cette comme dans de des du elle elles est et été être il ils je la le les leur "
        "lui mais nous par pas peut plus pour qu que qui sa sans se ses son sont sur un une vous"
    ),
    "spanish": (
        "al como con cuando de del desde donde el ella ellos en entre es esta este está fue ha hay la las lo "
        "los más muy para pero por porque que se ser si sin sobre su sus también tiene todo un una uno y ya"
    ),
    "italian": (
        "al alla anche che chi ci con da dal dalla degli dei del della delle di dove e è gli ha il la le lo "
        "ma nel nella non o per più questa questo quando se si sono su sua suo tra un una uno"
    ),
    "portuguese": (
        "ao aos as até com como da das de dele do dos é ela ele em entre está foi isso já mais mas muito na "
        "não nas no nos o os ou para pela pelo por quando que se sem ser seu sua são também tem um uma você"
    ),
    "dutch": (
        "aan als bij dan dat de deze die door een en er geen haar heb heeft het hij hun ik is je kan maar met "
        "naar niet nog nu om ook op te tot uit van veel voor waar was wat werd wij ze zich zij zijn zo"
    ),
}


class Lexicon:
    """Finds the words of some texts in a whole batch at once.

    A table of 2^16 entries gives the one word that a hash may mean, which is
    then compared: several times as fast as a binary search for each word.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.words = sorted({word for text in texts for word in text.split()})
        self._hashes = word_hashes(self.words)
        # The first factor with which no two words share a place; two tries are enough for 300 words.
        factors = (factor | np.uint64(1) for factor in splitmix64(23, 10_000))
        self._factor = next(f for f in factors if len(np.unique(self._hashes * f >> _TABLE)) == len(self.words))
        self._table = np.zeros(1 << 16, np.int16)
        self._table[self._hashes * self._factor >> _TABLE] = np.arange(len(self.words))

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """int16 [hashes]: the index of each word, -1 for the others."""
        index = self._table[hashes * self._factor >> _TABLE]
        return np.where(self._hashes[index] == hashes, index, np.int16(-1))

    def phrases(self, texts: Iterable[str]) -> list[tuple[int, ...]]:
        """The indices of the words of each text; ValueError for one that is not in it."""
        return [tuple(map(self.words.index, text.split())) for text in texts]


# Evidence of pages made of menus, banners and forms, after C4 and FineWeb (Raffel et al. 2020, Penedo et al. 2024),
# which delete such lines; a phrase is counted wherever it stands.
BOILERPLATE = tuple(
    phrase.strip()
    for phrase in """
    uses cookies, use of cookies, accept cookies, all cookies, cookie policy,
    privacy policy,
    terms of service, terms of use, terms and conditions,
    all rights reserved,
    our newsletter, subscribe now, subscribe to our,
    unsubscribe,
    log in to, sign in to, sign up for, create an account, forgot your password,
    enable javascript, requires javascript, javascript is disabled, javascript is required,
    javascript must be enabled, without javascript,
    share this, share on, follow us on,
    click here,
    read more, continue reading,
    leave a comment, leave a reply, post a comment,
    skip to content, skip to main content, back to top,
    advertisement
    """.split(",")
)
PLACEHOLDERS = ("lorem ipsum", "dolor sit amet")

_LEXICON = Lexicon([ENGLISH, *OTHERS.values(), *BOILERPLATE, *PLACEHOLDERS])


def _flags(words: Collection[str]) -> np.ndarray:
    """int64 [words of the lexicon, and one more for -1]: 1 for the given words."""
    return np.array([word in words for word in [*_LEXICON.words, ""]], np.int64)


_ENGLISH = _flags(ENGLISH.split())
_OTHERS = [_flags({*words.split()} - {*ENGLISH.split()}) for words in OTHERS.values()]
_PHRASES = {"boilerplate": _LEXICON.phrases(BOILERPLATE), "placeholders": _LEXICON.phrases(PLACEHOLDERS)}


def measure(words: Words) -> dict[str, np.ndarray]:
    """float64 [texts] each.

    `stop_words`: the share of words that are English function words.
    `foreign_lead`: how far the share of another language's function words
    exceeds it; at most zero for English, zero where too few words tell.
    `boilerplate`, `placeholders`: how often a phrase of these lists occurs.
    """
    indices = _LEXICON.find(words.hashes)
    positions = np.flatnonzero(indices >= 0)
    known = indices[positions]
    offsets = np.searchsorted(positions, words.offsets)

    def share(flags: np.ndarray) -> np.ndarray:
        total = prefix_sums(flags[known])
        return np.diff(total[offsets]) / np.maximum(words.counts, 1)

    english = share(_ENGLISH)
    lead = np.max([share(flags) for flags in _OTHERS], axis=0) - english
    # A share among a handful of words means nothing: short texts are taken as ordinary.
    too_short = words.counts < JUDGED_WORDS
    counts = {name: occurrences(words, positions, known, phrases) for name, phrases in _PHRASES.items()}
    return {"stop_words": np.where(too_short, 1.0, english), "foreign_lead": np.where(too_short, 0.0, lead), **counts}


def occurrences(
    words: Words, positions: np.ndarray, known: np.ndarray, phrases: Sequence[tuple[int, ...]]
) -> np.ndarray:
    """float64 [texts]: occurrences of any of the phrases; `known` are the indices of the words at `positions`."""
    starts = []
    for phrase in phrases:
        matches = np.flatnonzero(known == phrase[0])
        for step, index in enumerate(phrase[1:], 1):
            matches = matches[matches + step < len(known)]
            matches = matches[
                (known[matches + step] == index) & (positions[matches + step] == positions[matches] + step)
            ]
        owner = np.searchsorted(words.offsets, positions[matches], "right")
        ends = positions[matches] + len(phrase)
        starts.append(owner[ends <= words.offsets[owner]] - 1)
    return np.bincount(np.concatenate(starts), minlength=len(words)).astype(np.float64)
