"""The offline half: prefill a context once, index its keys by its queries, write the artifact."""

import csattn  # noqa: F401  # first, because it sets OpenMP's waiting policy before torch comes in
