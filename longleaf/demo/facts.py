"""Facts that the demo plants in documents and asks for: templates, words and the check of an answer."""

import random
import re
from dataclasses import dataclass

NOT_FOUND = "not found"
"""The model's answer if the key is not in the document."""

ATTRIBUTES = (
    "access code;account number;alarm code;badge number;batch number;booking code;cabinet number;case number;"
    "code;code name;delivery number;door code;file number;gate code;identifier;key code;licence number;"
    "locker number;magic number;member number;order number;parcel number;passcode;passphrase;password;"
    "phone number;pin;reference;registration;room number;secret number;serial number;shelf mark;tag;ticket number;"
    "token;tracking number;value;vault code;voucher code"
).split(";")

TEMPLATES = (
    ("The {attribute} for {key} is {value}.", "What is the {attribute} for {key}?"),
    ("Please note: the {attribute} assigned to {key} is {value}.", "What is the {attribute} assigned to {key}?"),
    ("{key} = {value}", "What is the value of {key}?"),
    ("{key}: {value}", "What is noted for {key}?"),
    ('"{key}": "{value}",', 'What is the value stored under "{key}"?'),
    ("According to the list, the {attribute} kept for {key} is {value}.", "Which {attribute} does {key} have?"),
    ("One of the special magic values for {key} is: {value}.", "What is the special magic value for {key}?"),
    ("It was agreed that the {attribute} for {key} would be {value}.", "Can you give me the {attribute} for {key}?"),
)
"""Sentence to plant and question to ask, in other words than the model's training. The value is close to its key,
because so small a model associates only nearby words."""

WORDS = """
acorn agate alder almond alpine amber anchor antler anvil apple apricot arch arrow ash aspen aster atlas autumn
badger bamboo banjo barley barrel basalt basil basin beacon beaver beech bell berry birch bison blanket blossom
bluff boat bonfire boulder bramble brass breeze brick bridge bronze brook broom bucket buffalo butter button cabin
cactus camel candle canoe canyon caramel cardinal cargo carpet castle cavern cedar cello chalk charcoal cherry
chestnut chimney cider cinder citrus clay cliff clover cloud cobalt cobble coconut comet compass copper coral
corner cotton cougar coyote crab cradle crane crater cricket crimson crocus crow crystal cypress daisy dawn deer
delta desert diamond dolphin donkey dove dragon drum dune dusk eagle ebony echo elder elk elm ember emerald estuary
falcon feather fennel fern ferry fiddle field fig finch fjord flame flannel flint flute forest fossil fountain fox
frost galaxy garden garlic garnet gazelle geyser ginger glacier glade glass goose gorge granite grape gravel grove
gull hammer harbor hare harp harvest hawk hazel heather hedge helmet hemlock heron hickory hill hollow honey horizon
hornet ibis icicle indigo iris iron island ivory ivy jackal jade jaguar jasmine jasper jetty juniper kayak kelp
kernel kettle kingfisher kite koala lagoon lake lantern larch lark laurel lava lavender ledge lemon leopard lichen
lily lime linden linen lion lizard llama lobster locust lotus lumber lupin lynx magnet magnolia magpie mallow mango
mantle maple marble marigold marlin marsh mason meadow melon mercury meteor midnight millet mint mirror mist monsoon
moon moor morning moss moth mountain mulberry mustard myrtle narwhal nebula nectar needle nettle nickel nomad north
nutmeg oak oasis oat obsidian ocean ochre olive onyx opal orange orbit orchard orchid osprey otter owl oyster paddle
panther paper parrot pasture peach peacock pear pebble pelican pepper petal pewter pheasant pigeon pillar pine pioneer
planet plateau plum pollen pond poplar poppy prairie prism puffin pumpkin quail quarry quartz quill quince rabbit
radish rain raisin ranger raven reed reef ribbon ridge river robin rocket rose ruby rust saddle saffron sage salmon
sand sapphire satin scarlet seal sequoia shadow shell shore sierra silk silver slate smoke snow sorrel sparrow spice
spruce squirrel starling steel stone storm stream sugar summer summit sunset swallow swan sycamore talon tamarind
teal temple thicket thistle thorn thunder tiger timber topaz torch tower trout tulip tundra turquoise twilight valley
vanilla velvet vine violet walnut walrus water wave whale wheat willow wind winter wolf wren yarrow yew zebra zephyr
zinc
""".split()

EVALUATION_WORDS = tuple(word for i, word in enumerate(WORDS) if i % 10 == 3)
"""Words that training never uses in keys or values; the demo uses only these."""


@dataclass(frozen=True)
class Fact:
    """A statement about a key, and the question that asks for it."""

    key: str
    value: str
    """Empty if no document contains the key."""
    sentence: str
    """The sentence to plant; empty if no document contains the key."""
    question: str
    expected: str
    """The model's right answer."""


def make_value(rng: random.Random, words: tuple[str, ...]) -> str:
    """A value of digits, hexadecimal digits or words."""
    kind = rng.random()
    if kind < 0.5:
        return str(rng.randrange(10**3, 10 ** rng.randint(4, 8)))
    if kind < 0.65:
        return f"{rng.getrandbits(32):08x}"[: rng.randint(5, 8)]
    if kind < 0.75:
        return f"{rng.randrange(1000):03d}-{rng.randrange(10**4):04d}"
    if kind < 0.85:
        return f"{rng.choice(words)} {rng.choice(words)}"
    return f"{rng.choice(words)}-{rng.randrange(10, 10000)}"


def make_key(rng: random.Random, words: tuple[str, ...]) -> str:
    """A key of two words, or of a word and a number, in one of the usual spellings."""
    first, second = rng.choice(words), rng.choice(words)
    forms = (
        f"{first} {second}",
        f"{first}-{second}",
        f"{first.title()} {second.title()}",
        f"{first}_{second}",
        f"{first}-{rng.randrange(10, 1000)}",
        f"{first.title()} {rng.randrange(10, 1000)}",
    )
    return rng.choice(forms)


def make_fact(rng: random.Random, key: str, value: str) -> Fact:
    """A fact in one of the templates' wording."""
    sentence, question = TEMPLATES[rng.randrange(len(TEMPLATES))]
    names = {"attribute": rng.choice(ATTRIBUTES), "key": key, "value": value}
    return Fact(key, value, sentence.format(**names), question.format(**names), f"{key} is {value}")


def evaluation_fact(rng: random.Random) -> Fact:
    """A fact whose words training never used."""
    return make_fact(rng, make_key(rng, EVALUATION_WORDS), make_value(rng, EVALUATION_WORDS))


def absent_fact(rng: random.Random) -> Fact:
    """A question about a key that is in no document."""
    fact = evaluation_fact(rng)
    return without_value(fact)


def without_value(fact: Fact) -> Fact:
    """The question, for a document without the key."""
    return Fact(fact.key, "", "", fact.question, f"{fact.key} is {NOT_FOUND}")


def is_correct(answer: str, fact: Fact) -> bool:
    """Whether the answer contains the fact's whole value, or "not found" for an absent key."""
    if not fact.value:
        return NOT_FOUND in answer.lower()
    pattern = rf"(?<![\w-]){re.escape(fact.value)}(?![\w-])"
    return re.search(pattern, answer) is not None
