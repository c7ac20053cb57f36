"""The verbs as coroutines. Made by scripts/async_surface.py, except for this file."""
