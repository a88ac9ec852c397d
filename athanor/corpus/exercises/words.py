"""Words for lists, names and problems.

List words are frequent in Python's own documentation, so that a tokenizer
trained on it gives most of them one token: a small model then learns to copy
and order them in minutes, where words of several pieces take it far longer.
"""

from __future__ import annotations

WORDS = tuple(
    """
    file name value object line list string method argument type class option code function time data path module key
    number header context message end text mode format error item version source thread case test widget event block
    sign buffer user map frame stream member position variable target parser point action range parent order date
    group package loop system port host break section stack level pattern document root tree window link cookie
    library space address result state index command process input output match tag child table queue signal image
    length width color element filter field pair mark word day year style screen button handle token search server
    python
    """.split()
)
THINGS = tuple(
    """
    files lines items keys names tests values fields pages words letters numbers links tags cells coins cards books
    pens stamps tickets photos songs
    """.split()
)
NAMES = tuple(
    """
    Anna Ben Carla David Emma Felix Grace Henry Ida Jack Kate Leo Maria Nina Oscar Paul Rosa Sam Tina Victor Alice Bob
    Clara Daniel Eva Frank Gina Hugo Irene James Karl Laura Martin Nora Otto Peter Ruth Simon Tom Wendy
    """.split()
)
CITIES = tuple(
    """
    Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Dublin London Athens Cairo Delhi Tokyo Lima Quito Boston Denver
    Dallas Miami Toronto Sydney Perth Zurich Geneva Milan Turin Seoul Hanoi Havana Bergen Krakow
    """.split()
)
JOBS = tuple(
    "baker teacher nurse doctor farmer singer painter driver writer lawyer pilot sailor miner tailor cook judge".split()
)
PETS = tuple("cat dog horse rabbit parrot hamster goat duck turtle pony snake mouse".split())
COLOURS = tuple("red blue green yellow black white brown pink gray gold silver purple orange violet".split())
