"""Moving house: contexts that leave for another service, and those that come from one."""
