"""Files that are read whole."""

from pathlib import Path

from longleaf.errors import InvalidArgument


def read_small(field: str, path: str | Path, max_bytes: int) -> bytes:
    """What is in a file of `max_bytes` at most. Raises InvalidArgument naming `field`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidArgument(field, f"{path}: {error.strerror}") from None
    if len(data) > max_bytes:
        raise InvalidArgument(field, f"{path} has more than {max_bytes:,} bytes")
    return data
