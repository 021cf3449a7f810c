"""The service as processes: in one (`local_app`), or on Ray (`ray_app`); HTTP and decoding are the same in both.

On Ray: Serve's proxy (`stream_guard`) -> `ray_ingress` replicas (`spread_backend`) -> attention workers
(`attention_actor`) -> search workers (`search_actor`). `making` turns settings into a model, an engine and a backend.
"""
