"""Finding facts in long documents: own generators of the usual synthetic tasks, their scores and a chart."""
