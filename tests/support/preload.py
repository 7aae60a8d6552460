"""What the processes of tests import, imported once in the process that they are forked from."""

from workers.imports import for_good

with for_good():
    import coordinator.__main__
    import longleaf.commands.app
    import workers.rank
    import zoo.checkpoints
    import zoo.families

__all__ = ["coordinator", "longleaf", "workers", "zoo"]
