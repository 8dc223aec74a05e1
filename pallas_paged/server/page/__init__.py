"""The page for a browser: its files, and the state of the pool that it draws."""
