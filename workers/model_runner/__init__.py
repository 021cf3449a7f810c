"""A decode loop of Llama-like models without Python work per kernel; attention is the caller's."""
