"""Search workers: processes that each search a share of the index heads, and communicate through shared memory.

Read `worker_searcher` (the engine's side) and `worker` first. `supervisor` starts workers and replaces those that are
lost. `step_searches` describes searches as records, for whole steps beside a GPU or for one layer (`layer_step`), and
`step_run` has all workers run one step. `mail` defines the messages; `channel`, `words` and `rendezvous` carry them.
"""
