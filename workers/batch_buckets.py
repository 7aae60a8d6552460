"""Into how many rows the decode steps of a device are padded."""

MAX_ROWS = 256
"""Of the largest bucket: to compute on more rows takes longer than to launch what computes."""


def bucket_sizes(max_rows: int) -> list[int]:
    """Powers of two, up to the first one that holds so many rows."""
    num_rows = min(MAX_ROWS, max_rows)
    return [1 << i for i in range((num_rows - 1).bit_length() + 1)]
