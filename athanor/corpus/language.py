"""The language gate: is this text English?

Judged by the share of ASCII characters and by function words: an English text
is full of English ones and has more of them than of any other language's. Six
languages that share the alphabet are told apart; scripts that do not are
caught by the ASCII share. It is a gate for English and no identifier of
languages, and it gives short texts the benefit of the doubt.
"""

from __future__ import annotations

import numpy as np

from athanor.corpus.words import Words, word_hashes

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
_ENGLISH = np.sort(word_hashes(ENGLISH.split()))
_OTHERS = {
    name: np.sort(word_hashes([word for word in words.split() if word not in ENGLISH.split()]))
    for name, words in OTHERS.items()
}


def members(hashes: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """bool [hashes]: which of them are in a sorted array."""
    place = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    return ordered[place] == hashes


def share(words: Words, ordered: np.ndarray) -> np.ndarray:
    """float64 [texts]: the share of words that are in a sorted array of hashes; 0 without words."""
    total = np.concatenate([[0], np.cumsum(members(words.hashes, ordered))])
    return np.diff(total[words.offsets]) / np.maximum(words.counts, 1)


def english_share(words: Words) -> np.ndarray:
    """float64 [texts]: the share of English function words."""
    return share(words, _ENGLISH)


def foreign_lead(words: Words) -> np.ndarray:
    """float64 [texts]: how far the share of another language's function words exceeds that of English ones.

    At most zero for English text; zero where there are too few words to tell.
    """
    lead = np.max([share(words, ordered) for ordered in _OTHERS.values()], axis=0) - english_share(words)
    return np.where(words.counts < JUDGED_WORDS, 0.0, lead)
