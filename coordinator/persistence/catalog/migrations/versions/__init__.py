"""One file per migration; a released one is never changed."""
