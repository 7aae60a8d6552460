"""Moves keys and values between ranks, in a step that does not run the model.

In each round a rank sends the content of some blocks to at most one other rank, and receives from at most one. A
checksum precedes the content. At the end, each receiver reports whether the checksums matched, and no rank continues
before all have received their blocks. Only free blocks are written, so the sources are intact until then.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from longleaf.comm import Comm
from longleaf.errors import TransferCorrupted
from longleaf.rank_protocol.step import Move, RunTransfer
from workers.host_copies import numbers_on
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.slots import KvPool

PIECE_BYTES = 16 << 20
"""Maximum bytes that a rank sends at once, unless one block is larger. Approximately four copies exist at a time."""
DIGEST_BYTES = 32
NO_RANK = -1


class BlockTransfer(NamedTuple):
    """Blocks that move from one rank to another in a round."""

    source: int
    target: int
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]


def move(work: Move, comm: Comm | None, pool: KvPool, block_table: BlockTable) -> None:
    """Executes a move. This is a collective: all ranks must call it together. `comm` is None at world size 1.

    Raises ValueError for an invalid move, and TransferCorrupted, on every rank, if received content differs from the
    sent content. After an error, the block table is unchanged.
    """
    check(work.transfers, comm.world_size if comm else 1)
    block_table.check(work.transfers)
    if comm is not None:
        carriage = BlockExchange(comm, Content(pool))
        for batch in rounds(work.transfers, carriage.most_blocks):
            carriage.exchange(batch)
        blocks = [block for run in work.windows for block in run.blocks]
        handing = BlockExchange(comm, Content(pool, of_windows=True))
        for first in range(0, len(blocks), handing.most_blocks):
            handing.broadcast_blocks(blocks[first : first + handing.most_blocks])
        check_all_ranks(comm, pool.device, max(carriage.damaged_by, handing.damaged_by))
    block_table.move(work.transfers)


def check(transfers: Sequence[RunTransfer], world_size: int) -> None:
    """Raises ValueError unless each run moves to another rank, as a whole, and no block is used twice."""
    sources = [(t.source.rank, block) for t in transfers for block in t.source.blocks]
    targets = [(t.target.rank, block) for t in transfers for block in t.target.blocks]
    if len({*sources, *targets}) < len(sources) + len(targets):
        raise ValueError("a move contains a block twice")
    for _, source, target in ((t.segment, t.source, t.target) for t in transfers):
        is_same = (source.start, source.end, len(source.blocks)) == (target.start, target.end, len(target.blocks))
        if not is_same or source.rank == target.rank or not 0 <= target.rank < world_size:
            raise ValueError(f"a run cannot move from {source} to {target}")


def rounds(transfers: Sequence[RunTransfer], most_blocks: int) -> Iterator[list[BlockTransfer]]:
    """The transfers of each round, of at most `most_blocks` blocks each. Pairs of ranks with the most remaining blocks
    have priority.
    """
    left: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for transfer in transfers:
        source, target = transfer.source, transfer.target
        left.setdefault((source.rank, target.rank), []).extend(zip(source.blocks, target.blocks, strict=True))
    while left:
        batch: list[BlockTransfer] = []
        for source, target in sorted(left, key=lambda pair: (-len(left[pair]), pair)):
            if all(source != transfer.source and target != transfer.target for transfer in batch):
                pairs = left[source, target]
                batch.append(BlockTransfer(source, target, *zip(*pairs[:most_blocks], strict=True)))
                left[source, target] = pairs[most_blocks:]
        left = {pair: blocks for pair, blocks in left.items() if blocks}
        yield batch


class Content:
    """The content of blocks as bytes: everything that a pool keeps in them, in every layer, bit for bit. They are the
    blocks that hold runs or, with `of_windows`, those of windowed layers with separate blocks.

    The bytes of a block are ordered by layer, then by tensor, then by key head. They do not include dtypes or sizes:
    the receiving pool must have the same form as the sending pool.
    """

    def __init__(self, pool: KvPool, *, of_windows: bool = False) -> None:
        self._device = pool.device
        self._tensors = [blocks.tensor for blocks in pool.blocks(of_windows=of_windows)]
        self._sizes = [tensor[:, 0].numel() * tensor.itemsize for tensor in self._tensors]
        self.bytes_per_block = sum(self._sizes)
        """0 where no layer has such blocks."""

    def export(self, blocks: Sequence[int]) -> Tensor:
        """The bytes of N blocks, uint8 [N, bytes_per_block], as a copy."""
        index_N = numbers_on(self._device, blocks)
        parts = [tensor.index_select(1, index_N).transpose(0, 1).flatten(1) for tensor in self._tensors]
        empty = torch.empty(len(blocks), 0, dtype=torch.uint8, device=self._device)
        return torch.cat([empty, *(part.contiguous().view(torch.uint8) for part in parts)], dim=1)

    def restore(self, blocks: Sequence[int], bytes_NB: Tensor) -> None:
        """Writes the exported bytes of N blocks to blocks of this pool. Raises RuntimeError if the sizes differ."""
        index_N = numbers_on(self._device, blocks)
        for tensor, part in zip(self._tensors, bytes_NB.split(self._sizes, dim=1), strict=True):
            own = part.clone(memory_format=torch.contiguous_format)  # bytes of wider numbers must be aligned
            shape = (len(blocks), len(tensor), *tensor.shape[2:])
            tensor.index_copy_(1, index_N, own.view(tensor.dtype).view(shape).transpose(0, 1))


class BlockExchange:
    """The part of one rank in the exchanges of content."""

    def __init__(self, comm: Comm, content: Content) -> None:
        self._comm = comm
        self._content = content
        self.most_blocks = max(1, PIECE_BYTES // max(1, content.bytes_per_block))
        self.damaged_by = NO_RANK
        """A rank whose content arrived corrupted."""

    def exchange(self, batch: Sequence[BlockTransfer]) -> None:
        """Sends this rank's blocks of a round, if any, and stores the received ones."""
        rank = self._comm.rank
        sent = next((transfer for transfer in batch if transfer.source == rank), None)
        coming = next((transfer for transfer in batch if transfer.target == rank), None)
        packed = self._pack(sent.source_blocks if sent else (), max(len(transfer.source_blocks) for transfer in batch))
        to, source = sent.target if sent else rank, coming.source if coming else rank
        received = self._comm.permute(packed, to, source)
        if coming:
            self._write_received(received, coming.target_blocks, source)

    def broadcast_blocks(self, blocks: Sequence[int]) -> None:
        """Copies the content of rank 0's blocks to the same blocks of all ranks."""
        is_first = self._comm.rank == 0
        received = self._comm.broadcast(self._pack(blocks if is_first else (), len(blocks)))
        if not is_first:
            self._write_received(received, blocks, 0)

    def _pack(self, blocks: Sequence[int], room: int) -> Tensor:
        """The checksum and the content of blocks, padded to `room` blocks: exchanges have the same size on all
        ranks.
        """
        content = self._content.export(blocks).flatten()
        digest = torch.frombuffer(bytearray(digest_of(content)), dtype=torch.uint8).to(content.device)
        padding = content.new_zeros((room - len(blocks)) * self._content.bytes_per_block)
        return torch.cat([digest, content, padding])

    def _write_received(self, received: Tensor, blocks: Sequence[int], source: int) -> None:
        size = self._content.bytes_per_block
        content = received[DIGEST_BYTES:][: len(blocks) * size]
        if bytes(received[:DIGEST_BYTES].tolist()) == digest_of(content):
            self._content.restore(blocks, content.view(len(blocks), size))
        else:
            self.damaged_by = source


def digest_of(content: Tensor) -> bytes:
    """The blake3 digest of the bytes."""
    return blake3(content.cpu().numpy().data).digest()


def check_all_ranks(comm: Comm, device: str, damaged_by: int) -> None:
    """Waits for all ranks. Raises TransferCorrupted if one of them received corrupted content."""
    for target, source in enumerate(comm.all_gather(torch.tensor([damaged_by], device=device)).flatten().tolist()):
        if source != NO_RANK:
            raise TransferCorrupted(source, target)
