"""The numbers of rows to which a device's decode steps are padded."""

MAX_ROWS = 256
"""Rows of the largest bucket. With more rows, the computation takes longer than the launches."""


def bucket_sizes(max_rows: int) -> list[int]:
    """Powers of two, up to the first one that holds `max_rows` rows."""
    num_rows = min(MAX_ROWS, max_rows)
    return [1 << i for i in range((num_rows - 1).bit_length() + 1)]
