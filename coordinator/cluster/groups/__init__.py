"""Process groups: how an epoch's members rendezvous, run steps and fail."""
