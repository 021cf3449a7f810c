"""Learned indexers (DeepSeek-V3.2, V4): score every key with a few small heads, attend to the best.

Import from the modules. `order` is what "best" means in all of them, `score` what a score is.
"""
