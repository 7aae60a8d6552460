"""Checks that all machines have the same model, by the fingerprints that their first ranks report."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from longleaf.errors import StartError
from longleaf.fingerprint import TEXTS, Fingerprint, read_texts
from longleaf.rank_protocol.member_messages import Hello

MAX_LISTED = 3
"""Maximum number of machines listed by name."""


async def check_models(hellos: Sequence[Hello], folder: Path) -> None:
    """Raises StartError listing each node that lacks the model or has another model than the majority, with one file
    that differs; ModelRefused when the folder no longer exists here. In a tie, the model of rank 0's node counts as
    the majority.

    The coordinator reads text files from `folder` on its own machine; they are compared as well.
    """
    fingerprints = [(hello, hello.fingerprint) for hello in hellos if hello.fingerprint is not None]
    faults = [f"{_place(hello)}: {hello.missing}" for hello in hellos if hello.missing]
    if fingerprints:
        commonest = Counter(fingerprint.digest for _, fingerprint in fingerprints).most_common(1)[0][0]
        first, expected = next(pair for pair in fingerprints if pair[1].digest == commonest)
        others = [(_place(hello), one) for hello, one in fingerprints if one.digest != commonest]
        faults += [_difference(where, one.files, _place(first), expected.files) for where, one in others]
        own = await asyncio.to_thread(read_texts, folder)
        texts = texts_of(expected)
        if own != texts:
            faults.append(_difference("the coordinator's node", own, _place(first), texts))
    if faults:
        more = f"; and {len(faults) - MAX_LISTED} more" if len(faults) > MAX_LISTED else ""
        raise StartError(f"model: {'; '.join(faults[:MAX_LISTED])}{more}")


def check_joiner(hello: Hello, agreed: Sequence[Hello]) -> None:
    """Raises StartError when a member's model differs from that of the members checked before."""
    if hello.missing:
        raise StartError(f"model: {_place(hello)}: {hello.missing}")
    first = next((other for other in agreed if other.fingerprint is not None), None)
    if first is None or first.fingerprint is None or hello.fingerprint is None:
        return
    if hello.fingerprint.digest != first.fingerprint.digest:
        difference = _difference(_place(hello), hello.fingerprint.files, _place(first), first.fingerprint.files)
        raise StartError(f"model: {difference}")


def texts_of(fingerprint: Fingerprint) -> dict[str, str]:
    """The digests of the text files, which the coordinator reads as well."""
    return {name: digest for name, digest in fingerprint.files.items() if name in TEXTS}


def _place(hello: Hello) -> str:
    return f"node {hello.node} ({hello.host})"


def _difference(here: str, files: Mapping[str, str], there: str, expected: Mapping[str, str]) -> str:
    """Describes one file in which `here` differs from `there`. Text files come first, because users edit those."""
    names = sorted(files.keys() | expected.keys(), key=lambda name: (name not in TEXTS, name))
    differing = [name for name in names if files.get(name) != expected.get(name)]
    name, more = differing[0], f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    if name not in files:
        return f"{here} lacks {name}, which exists on {there}{more}"
    if name not in expected:
        return f"{here} has {name}, which is missing on {there}{more}"
    return f"{here} has a different {name} than {there}{more}"
