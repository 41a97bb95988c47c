"""The closed vocabulary of the demo tasks: a small model can only be fluent in few words, so they are listed."""

from random import Random
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FEMALE: Final = _words(
    "Anna Mia Lena Sara Emma Nina Ella Ruth Clara Julia Grace Alice Maya Zoe Olga Irene Rosa Lucy Nora Eva "
    "Hanna Jane Kate Lily Mary Paula Rita Sofia Tina Vera"
)
MALE: Final = _words(
    "Tom Ben Max Leo Sam Jack Adam Paul Mark Noah Liam Omar Ivan Hugo Carl Dan Erik Finn George Henry "
    "Jonas Kevin Luke Mike Nick Oscar Peter Ravi Simon Victor"
)
OBJECTS: Final = _words(
    "apples oranges pears plums lemons cherries bananas peaches cookies muffins candies pencils pens books stickers "
    "marbles coins stamps cards shells stones balloons toys dolls cars kites flowers roses tulips seeds eggs cups "
    "plates spoons candles buttons beads ribbons bottles boxes hats socks shirts scarves chairs tickets photos "
    "magazines puzzles crayons notebooks keys bricks tiles nails tomatoes potatoes carrots onions sandwiches"
)
CONTAINERS: Final = _words("bags boxes baskets crates jars packs cartons drawers trays buckets")
PLACES: Final = _words(
    "market park school library station harbor museum garden farm bakery castle beach forest office theater "
    "hospital village bridge river mountain square tower kitchen workshop airport"
)
DAYS: Final = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
COLORS: Final = _words(
    "amber azure black blue bronze brown coral cream crimson cyan golden gray green indigo ivory jade lilac lime "
    "maroon mint olive orange pearl pink purple red ruby silver violet white yellow ancient brave bright broken calm "
    "clever cold curious dark distant early empty fast fragile gentle giant happy hidden honest hollow hungry icy "
    "lazy little lonely loud lucky mellow misty noble old polite proud quiet rapid rusty sharp shiny silent sleepy "
    "small smooth solid stormy sturdy sunny swift tall tiny warm wild wise young"
)
THINGS: Final = _words(
    "anchor arrow badger barrel beacon bear beaver bell boat canyon camel candle castle cat clock cloud comet "
    "compass crane crow crown deer dolphin dragon drum eagle engine falcon feather ferry fox garden ghost goat "
    "hammer harp hawk hedgehog heron horse island kettle kite ladder lantern lion lizard magnet maple mirror monkey "
    "moon mouse needle otter owl panda panther parrot pebble piano pigeon pilot planet rabbit raven river robin "
    "rocket sailor salmon saddle shark shield spider squirrel star statue stork swan temple thunder tiger tower "
    "train turtle valley violin walrus whale wolf zebra"
)
FILLERS: Final = (
    "{name} walked to the {place} on {day}.",
    "It rained near the {place} all {day}.",
    "{name} and {other} met at the {place}.",
    "The {place} was closed on {day}.",
    "{name} bought {number} {objects} at the {place}.",
    "The {color} {thing} stood behind the {place}.",
    "{other} saw a {color} {thing} by the {place}.",
    "Nobody knew why the {thing} was so {color}.",
    "{name} counted {number} {objects} on {day}.",
    "The road to the {place} is long.",
)

_CONSONANTS: Final = "bdfgklmnprstvz"
_VOWELS: Final = "aeiou"


def pseudo_word(rng: Random) -> str:
    """Make up a word of two or three syllables, so that the model learns to copy unlisted names and objects."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3)))


def filler(rng: Random) -> str:
    """Draw a sentence that has no fact of any question."""
    return rng.choice(FILLERS).format(
        name=rng.choice(FEMALE),
        other=rng.choice(MALE),
        place=rng.choice(PLACES),
        day=rng.choice(DAYS),
        objects=rng.choice(OBJECTS),
        color=rng.choice(COLORS),
        thing=rng.choice(THINGS),
        number=rng.randint(2, 99),
    )
