"""Task families: each is a module here with `generate`, `LAYOUTS` and `DEFAULT_LAYOUT`, found by its stem."""
