"""The wording of training's facts and questions: frames put together from parts, none of which the demo uses.

Many frames teach the model to recognise a key among other words, instead of the frames.
"""

import random

STARTS = (
    "The {attribute} of |Recorded {attribute} of |{attribute} of |For the record, the {attribute} of |Remember: |"
    "Note that |Keep in mind that |- |* |# |entry |item |Our {attribute} at |my {attribute} with |set |let |"
    "the {attribute} listed under |As agreed, |In this file |(see below) |Everyone knows that |"
    "the {attribute} belonging to |Do not forget that |1. |"
).split("|")
"""Text before the key; the last is empty."""

LINKS = (
    " is | is | is | = | = |: |: | -> | => |=| was | equals | is: | is now | must be | means | is still | will be |"
    " has been | could be | gets | became | goes by "
).split("|")
"""Text between key and value."""

BARE_LINKS = (" = ", ": ", "=", " -> ", "\t")
"""The same where nothing stands before the key."""

QUOTED_LINKS = (": ", ": ", ":", " = ", " -> ", " is ")
"""The same where both are in quotation marks."""

ENDS = (".", ".", ".", "", ";", ",", "!", " .", ". That is all.", ", as before.", " (checked).")
QUOTED_ENDS = (",", "", ".", " }")

LEADS = (
    "|||||please, |could you say, |I would like to know: |quick question: |according to the text, |tell me, |"
    "do you remember, |hello, |in the document, |say: |we need it: |now, "
).split("|")
"""Optional text before a question."""

ABOUT_ATTRIBUTE = (
    "what is the {attribute} of {key}?|tell me the {attribute} of {key}.|which {attribute} belongs to {key}?|"
    "give the {attribute} of {key}|do you know the {attribute} of {key}?|say the {attribute} recorded for {key}.|"
    "{attribute} of {key}?|find the {attribute} listed under {key}.|I need the {attribute} of {key}.|"
    "what was the {attribute} of {key} again?|what {attribute} did {key} get?|"
    "which {attribute} was given to {key} then?|what does {key} have as {attribute}?|has {key} a {attribute}?|"
    "which {attribute} goes with {key} here?|for {key}, what is the {attribute}?|{key} has which {attribute}?|"
    "{key}'s {attribute}?|what {attribute} is {key} known by?|is there any {attribute} with {key}?|"
    "the {attribute} kept by {key} is what?|what would be the {attribute} at {key}?|which {attribute} do {key} use?|"
    "may I have the {attribute} that is with {key}?|I forgot which {attribute} {key} was given.|"
    "would you mind telling us the {attribute} of {key}?|let me hear the {attribute} that {key} got.|"
    "we were told about {key}: what is its {attribute}?|please read out the {attribute} from {key}.|"
    "somebody asked me about the {attribute} of {key}|how does one find the {attribute} at {key}?|"
    "{key} came with some {attribute}, which one?|who knows the {attribute} on {key}?|"
    "does anybody remember the {attribute} given to {key}?|show us the {attribute} near {key}.|"
    "what do I enter as {attribute} with {key}?|under which {attribute} is {key} kept?|"
    "the {attribute}, in the case of {key}?|what has {key} been given as its {attribute}?"
).split("|")
ABOUT_KEY = (
    "what is {key}?|{key}?|{key}|find {key}.|look up {key}|what does it say about {key}?|search for {key}.|"
    "what about {key}?|show {key}|read me the entry {key}.|where is {key}, and what does it say?|"
    "what does {key} mean?|under {key}, what is written?|what is written next to {key}?|"
    "the entry under {key} says what?|what value was kept with {key}?|what stands beside {key} in the text?|"
    "what did they write about {key} there?|which number or word belongs to {key}?|what is stored as {key}?|"
    "what is the line about {key}?|does {key} appear, and with what?|what has been set for {key} so far?|"
    "the value at {key}?|what is the content of {key}?|which magic word opens {key}?|"
    "I wonder what is behind {key}.|please let us know what {key} is.|somewhere there is {key}, with what?|"
    "what comes after {key}?|which entry is that of {key}?|anything about {key}?|we ask again about {key}"
).split("|")
"""Questions, with the attribute that the fact names and without."""

MORE_ABOUT_ATTRIBUTE = (
    "what {attribute} does {key} carry?|which {attribute} did {key} receive?|what {attribute} has {key} now?|"
    "does {key} still own a {attribute}?|which {attribute} should {key} show?|what did {key} take as its {attribute}?|"
    "is {key} listed with some {attribute}?|was {key} ever handed a {attribute}?|what will {key} need as {attribute}?|"
    "tell me which {attribute} {key} keeps.|{key} holds what {attribute}?|what {attribute} stands by {key} there?|"
    "could you hand me the {attribute} in {key}?|can we see the {attribute} on {key}?|"
    "will you read me the {attribute} near {key} please?|may we hear what {attribute} {key} brings?|"
    "would {key} come with a {attribute}?|can anyone name the {attribute} around {key}?|"
    "which {attribute} were you told with {key} then?|how would {key} answer, asked its {attribute}?"
).split("|")
MORE_ABOUT_KEY = (
    "does {key} occur?|what has {key} got?|what does {key} say?|is {key} in there?|how about {key} then?|"
    "what would {key} be?|can you see {key} anywhere?|did {key} come up?|has {key} been set?|what did {key} hold?"
).split("|")
"""Questions of the last phase, most with words after the key, which must not be taken for a part of it."""

MARKS = ('"', '"', "'", "`", "*")


def statement(rng: random.Random, attribute: str, key: str, value: str) -> str:
    """A sentence or a line that gives `key` its `value`."""
    kind = rng.random()
    if kind < 0.2:
        mark = rng.choice('""\'`')
        return f"{mark}{key}{mark}{rng.choice(QUOTED_LINKS)}{mark}{value}{mark}{rng.choice(QUOTED_ENDS)}"
    if kind < 0.35:
        return f"{key}{rng.choice(BARE_LINKS)}{value}"
    start = rng.choice(STARTS).format(attribute=attribute)
    return f"{start}{key}{rng.choice(LINKS)}{value}{rng.choice(ENDS)}"


def question(rng: random.Random, attribute: str, key: str, more: bool) -> str:
    """A question for `key`; `more` adds the frames of the last phase."""
    mark = rng.choice(MARKS) if rng.random() < 0.2 else ""
    about_attribute = ABOUT_ATTRIBUTE + MORE_ABOUT_ATTRIBUTE if more else ABOUT_ATTRIBUTE
    about_key = ABOUT_KEY + MORE_ABOUT_KEY if more else ABOUT_KEY
    frame = rng.choice(LEADS) + rng.choice(about_attribute if rng.random() < 0.6 else about_key)
    frame = frame if frame.startswith("{") or rng.random() < 0.1 else frame[0].upper() + frame[1:]
    return frame.format(attribute=attribute, key=f"{mark}{key}{mark}")
