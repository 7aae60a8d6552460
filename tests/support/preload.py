"""Modules preloaded for test processes."""

from workers.imports import frozen_imports

with frozen_imports():
    import coordinator.__main__
    import longleaf.cli.app
    import workers.rank
    import zoo.checkpoints
    import zoo.families

__all__ = ["coordinator", "longleaf", "workers", "zoo"]
