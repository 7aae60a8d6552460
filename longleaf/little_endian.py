"""Arrays of integers as the little-endian bytes that are stored and sent, independent of the machine."""

import sys
from array import array
from typing import Literal

IntegerType = Literal["H", "I", "Q"]
"""Unsigned integers of 2, 4 and 8 bytes, as type codes of arrays."""


def pack(numbers: "array[int]") -> memoryview:
    """The bytes of an array, which are not copied on little-endian machines."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return memoryview(numbers).cast("B")


def unpack(kind: IntegerType, data: bytes | bytearray) -> "array[int]":
    """The array of type `kind` with these bytes. Raises ValueError if the last number is incomplete."""
    found = array(kind)
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found
