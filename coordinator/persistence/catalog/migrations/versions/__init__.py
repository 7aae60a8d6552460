"""One file per step; none is ever changed once it was released."""
