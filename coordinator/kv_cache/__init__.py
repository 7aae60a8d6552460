"""Which keys lie where: contexts, segments, and the blocks of each rank."""
