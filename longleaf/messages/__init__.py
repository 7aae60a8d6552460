"""What clients and service say to each other, as plain structs. Counts are in tokens, sizes in bytes, times in seconds.

`longleaf.codec` alone turns them into protobuf messages and back.
"""

from longleaf.messages.cluster import (
    Cluster,
    ModelInfo,
    Verification,
    Verify,
    Worker,
)
from longleaf.messages.contexts import (
    UNCHANGED,
    Context,
    ContextOptions,
    ContextSettings,
    ForkContext,
    IngestHeader,
    IngestOptions,
    IngestPhase,
    IngestPiece,
    IngestProgress,
    PositionInfo,
    RankShare,
    Tokenized,
)
from longleaf.messages.generation import (
    Delta,
    Event,
    Finished,
    FinishReason,
    Generate,
    GenerateOptions,
    Progress,
    Resume,
    SamplingOptions,
    Started,
    Timings,
    Usage,
)

__all__ = [
    "UNCHANGED",
    "Cluster",
    "Context",
    "ContextOptions",
    "ContextSettings",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "ForkContext",
    "Generate",
    "GenerateOptions",
    "IngestHeader",
    "IngestOptions",
    "IngestPhase",
    "IngestPiece",
    "IngestProgress",
    "ModelInfo",
    "PositionInfo",
    "Progress",
    "RankShare",
    "Resume",
    "SamplingOptions",
    "Started",
    "Timings",
    "Tokenized",
    "Usage",
    "Verification",
    "Verify",
    "Worker",
]
