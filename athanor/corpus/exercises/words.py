"""Everyday words for lists, names and problems; none is longer than seven letters."""

from __future__ import annotations

WORDS = tuple(
    """
    apple pear plum lemon grape mango melon peach cherry fig olive onion carrot potato tomato bean corn rice bread
    cheese butter milk egg honey sugar salt pepper soup cake pie tea coffee juice water wine cat dog horse cow pig
    sheep goat duck goose hen fox wolf bear lion tiger mouse rabbit frog snake fish whale shark bird eagle owl bee ant
    spider tree leaf root seed flower rose grass river lake sea island hill stone sand rain snow wind storm cloud sun
    moon star sky fire ice smoke red blue green yellow black white brown pink gray gold silver iron copper wood paper
    glass cloth table chair desk lamp bed door window wall floor roof house garden road bridge train boat ship plane
    car bike wheel engine hammer nail saw rope box bag cup plate bowl fork spoon knife key lock ring coat shirt hat
    shoe sock belt book pen pencil letter map clock phone camera radio guitar drum piano song dance game ball kite
    """.split()
)
THINGS = tuple(
    """
    apples pears plums lemons grapes eggs cards books pens pencils coins stamps shells stones marbles cookies buttons
    balls tickets letters keys cups plates boxes bottles flowers seeds nails photos maps songs files stickers beads
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
