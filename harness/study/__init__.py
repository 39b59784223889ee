"""The study tells what recorded routing is like: popularity, correlation, predictability, and what caches gain.

Torch is imported only where a checkpoint's routers are applied."""
