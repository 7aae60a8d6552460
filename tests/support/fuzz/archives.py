"""Archives that are forged with knowledge of their structure: each seed gives one, most with right checksums.

An archive is changed as a tree of plain values (heads, segments, ids, pieces) and sealed again, so that more of it is
looked at than its checksums.
"""

import json
import math
import random
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import torch
from blake3 import blake3

from longleaf.context_archive.frames import PREAMBLE, Frame, Kind
from longleaf.fingerprint import Fingerprint
from longleaf.positions import EVERY_RANK, AttentionSpan
from longleaf.runs import Run, ceil_div
from workers.kv_cache.slots import FloatKvPool, KvPool
from workers.kv_io.kv_piece import HostCopy, form_of
from workers.model.model import LayerSpec

BLOCK, NUM_BLOCKS, NUM_WINDOW_BLOCKS = 4, 100, 64
WINDOW = 6
VOCABULARY = 1 << 17
CAPACITY = 2000
ODD: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        3,
        4,
        5,
        7,
        2**31,
        2**40,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
        1.5,
        math.nan,
        math.inf,
        "",
        "x" * 300,
        "a/b",
    ),
    *(None, True, [], {}, [[0, 0]], [[0, 4]], [[4, 0]], [0, 0], b"\0"),
)
Tree = dict[str, Any]


def pool(*, windows: bool, seed: int = 1) -> KvPool:
    """A small pool with arbitrary blocks; with `windows` one layer sees only the last keys."""
    full, near = LayerSpec(2, 1, 4, AttentionSpan()), LayerSpec(2, 1, 4, AttentionSpan(window=WINDOW))
    layers, num_window_blocks = {0: full, 1: near if windows else full}, NUM_WINDOW_BLOCKS if windows else None
    made = FloatKvPool(layers, NUM_BLOCKS, BLOCK, torch.float32, "cpu", num_window_blocks)
    generator = torch.Generator().manual_seed(seed)
    for of_windows in (False, True):
        for _, tensor, _ in made.blocks(of_windows=of_windows):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return made


class Archive:
    """An archive of two segments, as a tree of plain values."""

    def __init__(self, slots: KvPool, fingerprint: Fingerprint, seed: int, name: str) -> None:
        self.rng = random.Random(seed)
        self._slots = slots
        sizes = [self.rng.randint(1, 40) for _ in range(self.rng.randint(1, 3))]
        self.head: Tree = {
            "fingerprint": msgspec.to_builtins(fingerprint),
            "model": "fake",
            "context": name,
            "num_tokens": sum(sizes),
            "ends": [sum(sizes)],
            "capacity": CAPACITY,
            "created": 1.0,
            "updated": 2.0,
            "display_name": "",
            "is_pinned": False,
            "expires": None,
        }
        self.segments: list[Tree] = []
        start = 0
        for size in sizes:
            self.segments.append(self._segment(start, size))
            start += size

    def _segment(self, start: int, size: int) -> Tree:
        cut = self.rng.randrange(0, size + 1, BLOCK)
        runs = [(low, high) for low, high in ((start, start + cut), (start + cut, start + size)) if low < high]
        parts, contents = list[Tree](), list[bytes]()
        for low, high in runs:
            self._add(parts, contents, low, high, of_windows=False)
        windows = None
        if self._slots.blocks(of_windows=True):
            self._add(parts, contents, max(start, start + size - WINDOW - 2), start + size, of_windows=True)
            windows = parts.pop()
        forms = [form_of(self._slots, of_windows=of_windows) for of_windows in (False, True)]
        keys: Tree = {"form": "|".join(forms), "pieces": parts, "windows": windows}
        reported = {"num_used": size, "num_tokens": size, "rope": [0, False], "keys": keys, "text": None}
        ids = [self.rng.randrange(VOCABULARY) for _ in range(size)]
        return {"head": reported, "ids": ids, "pieces": contents}

    def _add(self, parts: list[Tree], contents: list[bytes], low: int, high: int, *, of_windows: bool) -> None:
        count, rank = ceil_div(high - low, BLOCK), EVERY_RANK if of_windows else 0
        run = Run(rank, low, high, tuple(self.rng.sample(range(NUM_WINDOW_BLOCKS), count)))
        content = b"".join(HostCopy(self._slots, [run], of_windows=of_windows).parts())
        parts.append({"runs": [[low, high]], "num_bytes": len(content), "digest": blake3(content).hexdigest()})
        contents.append(content)

    def parts(self) -> list[tuple[Tree, list[bytes], int]]:
        """Parts of keys, and where their contents are."""
        found = list[tuple[Tree, list[bytes], int]]()
        for segment in self.segments:
            keys = segment["head"].get("keys")
            if not isinstance(keys, dict) or not isinstance(keys.get("pieces"), list):
                continue
            parts = [*keys["pieces"], keys.get("windows")]
            known = [part for part in parts if isinstance(part, dict) and isinstance(part.get("runs"), list)]
            found += [(part, segment["pieces"], i) for i, part in enumerate(known[: len(segment["pieces"])])]
        return found

    def describe(self) -> None:
        """Updates the stated size and digest of each part."""
        for part, contents, i in self.parts():
            part["num_bytes"], part["digest"] = len(contents[i]), blake3(contents[i]).hexdigest()

    def sealed(self) -> bytes:
        """Its bytes, with right checksums."""
        whole, digest = bytearray(PREAMBLE), blake3(PREAMBLE)

        def add(kind: Kind, content: bytes) -> None:
            frame = Frame.of(kind, content).encode()
            digest.update(frame)
            whole.extend(frame + content)

        add("head", msgspec.msgpack.encode(self.head))
        for segment in self.segments:
            add("segment", msgspec.msgpack.encode(segment["head"]))
            if segment["ids"]:
                add("ids", array("I", segment["ids"]).tobytes())
            for content in segment["pieces"]:
                add("piece", content)
        add("end", digest.digest())
        return bytes(whole)


# --- changes ---


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    """Containers and keys of all values in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = list[tuple[Any, Any]]()
    for key, value in list(items):
        found.append((tree, key))
        found += _leaves(value)
    return found


def odd_value(archive: Archive) -> None:
    rng = archive.rng
    tree = rng.choice([archive.head, *(segment["head"] for segment in archive.segments)])
    container, key = rng.choice(_leaves(tree))
    if rng.random() < 0.2:
        del container[key]
    elif isinstance(container[key], int) and rng.random() < 0.5:
        container[key] += rng.choice([-4, -1, 1, 4])
    else:
        container[key] = rng.choice(ODD)


def lengths(archive: Archive) -> None:
    """Segments that are used in part, or have more tokens than they state."""
    segment, rng = archive.rng.choice(archive.segments), archive.rng
    segment["head"][rng.choice(["num_used", "num_tokens"])] += rng.choice([-3, -1, 1, 5])
    if rng.random() < 0.5:
        segment["ids"] = segment["ids"][: segment["head"]["num_tokens"]]
    if rng.random() < 0.5:
        archive.head["num_tokens"] = sum(one["head"]["num_used"] for one in archive.segments)
        archive.head["ends"] = [archive.head["num_tokens"]]


def ends(archive: Archive) -> None:
    most = archive.head["num_tokens"]
    count = archive.rng.choice([0, 1, 3, 80, 5000])
    archive.head["ends"] = [archive.rng.randint(-1, most + 1) for _ in range(count)] + archive.rng.choice([[], [most]])
    if archive.rng.random() < 0.5:
        archive.head["ends"] = sorted(set(archive.head["ends"]))


def runs(archive: Archive) -> None:
    """Runs that are cut, moved, joined, empty, twice, or of other positions."""
    if not (found := archive.parts()):
        return
    part, rng = archive.rng.choice(found)[0], archive.rng
    own = part["runs"]
    if not own or not all(isinstance(run, list) and len(run) == 2 for run in own):
        return
    low, high = own[0]
    middle = low + (high - low) // 2
    part["runs"] = rng.choice(
        [
            [[low, middle], [middle, high]],
            [[low - 1, high]],
            [[low + 1, high]],
            [[low, high + 1]],
            [[low, low], [low, high]],
            [[low, high], [low, high]],
            [[high, low]],
            [[i, i + 1] for i in range(low, min(high, low + 64))],
            [[0, 2**40]],
            [],
        ]
    )


def pieces(archive: Archive) -> None:
    """Pieces that are missing, twice, in another order, or of another segment."""
    segment, rng = archive.rng.choice(archive.segments), archive.rng
    keys = segment["head"]["keys"]
    if not isinstance(keys, dict) or not segment["pieces"]:
        return
    match rng.randrange(5):
        case 0:
            del segment["pieces"][rng.randrange(len(segment["pieces"]))]
        case 1:
            keys["pieces"] = keys["pieces"] * 2
        case 2:
            keys["pieces"] = keys["pieces"][::-1]
        case 3:
            keys["windows"] = rng.choice([None, *keys["pieces"]])
        case _:
            segment["pieces"][0] = rng.choice(rng.choice(archive.segments)["pieces"] or [b"none"])
            archive.describe()


def cut_within_a_block(archive: Archive) -> None:
    """As one file did that ended the service: two pieces that meet within a block."""
    segment, rng = archive.rng.choice(archive.segments), archive.rng
    keys = segment["head"]["keys"]
    if not isinstance(keys, dict) or len(keys["pieces"]) != 2:
        return
    cut = rng.randint(keys["pieces"][0]["runs"][0][0] + 1, keys["pieces"][1]["runs"][0][1] - 1)
    for part, i in zip(keys["pieces"], (1, 0), strict=True):
        part["runs"][0][i] = cut


def header_of_a_piece(archive: Archive) -> None:
    """A piece whose header states something else than its bytes hold."""
    if not (found := archive.parts()):
        return
    (_, contents, i), rng = archive.rng.choice(found), archive.rng
    content = contents[i]
    size = int.from_bytes(content[:8], "little")
    try:
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    except ValueError:
        return
    match rng.randrange(6):
        case 0:
            container, key = rng.choice(_leaves(header))
            container[key] = rng.choice([value for value in ODD if not isinstance(value, bytes)])
        case 1:  # so many blocks that take no bytes
            count = rng.choice([1000, 4_000_000, 2**40])
            header["__metadata__"]["positions"] = f"0-{count * BLOCK}"
            for name in header.keys() - {"__metadata__"}:
                header[name] = {"dtype": "F32", "shape": [count, 0], "data_offsets": [0, 0]}
            data = b""
        case 2:
            names = [name for name in header if name != "__metadata__"]
            header[rng.choice(["0.keys", "9.keys", ""])] = header.pop(rng.choice(names)) if names else {}
        case 3:
            header["__metadata__"]["form"] = "blocks of 1"
        case 4:
            data += bytes(rng.choice([1, 64, 4096]))
        case _:
            header |= {str(i): {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for i in range(2000)}
    text = json.dumps(header).encode()
    contents[i] = len(text).to_bytes(8, "little") + text + data
    archive.describe()


def bytes_of_a_piece(archive: Archive) -> None:
    if not (found := archive.parts()):
        return
    (_, contents, i), rng = archive.rng.choice(found), archive.rng
    content = contents[i]
    contents[i] = rng.choice(
        [
            content[: rng.randrange(1, len(content) + 1)],
            (2**64 - 1).to_bytes(8, "little") + content[8:],
            rng.randbytes(rng.choice([1, 7, 8, 200])),
            content[:-8] + b"\xff" * 8,  # not finite
        ]
    )
    archive.describe()


def other_ids(archive: Archive) -> None:
    segment = archive.rng.choice(archive.segments)
    if segment["ids"]:
        segment["ids"][archive.rng.randrange(len(segment["ids"]))] = archive.rng.choice(
            [0, VOCABULARY - 1, VOCABULARY, 2**32 - 1]
        )


def order(archive: Archive) -> None:
    rng = archive.rng
    if rng.random() < 0.5:
        archive.segments.append(rng.choice(archive.segments))
    else:
        rng.shuffle(archive.segments)


CHANGES: tuple[Callable[[Archive], None], ...] = (
    odd_value,
    odd_value,
    lengths,
    ends,
    runs,
    runs,
    pieces,
    cut_within_a_block,
    header_of_a_piece,
    header_of_a_piece,
    bytes_of_a_piece,
    other_ids,
    order,
)


def forge(seed: int, slots: KvPool, fingerprint: Fingerprint, name: str = "book") -> bytes:
    """The archive of a seed, for a service with such a pool and checkpoint. One in sixteen is not forged."""
    archive = Archive(slots, fingerprint, seed, name)
    rng = archive.rng
    for _ in range(0 if seed % 16 == 0 else rng.choice([1, 1, 1, 2, 3])):
        with suppress(Exception):  # an earlier change left nothing that this one could change
            rng.choice(CHANGES)(archive)
    try:
        whole = bytearray(archive.sealed())
    except OverflowError:  # a number that no message can have
        return forge(seed + 1_000_000_007, slots, fingerprint, name)
    if rng.random() < 0.05:  # damage that checksums detect
        whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.05:
        del whole[rng.randrange(len(whole)) :]
    return bytes(whole)
