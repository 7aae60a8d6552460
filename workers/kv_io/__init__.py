"""Background transfer of keys and values between a rank and the storage."""
