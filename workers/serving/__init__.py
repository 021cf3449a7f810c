"""Decode many requests at once: what is asked and told, the scheduler, its contexts, and what it measures."""
