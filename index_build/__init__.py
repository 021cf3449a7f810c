"""The offline half: prefill a context once, index its keys by its queries, write the artifact."""
