"""Search workers: processes that each search some heads, asked through shared memory.

Read `worker_searcher` (the engine's side) and `worker` first. `supervisor` starts workers and replaces those that are
lost; `step_searches` are searches as records, of whole steps beside a GPU or of one layer (`layer_step`), and
`step_run` is one step by all workers; `mail` is what is said, `channel`, `words` and `rendezvous` the way there.
"""
