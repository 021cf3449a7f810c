"""How an index serves a generation that outgrows its context."""
