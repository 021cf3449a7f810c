"""Search workers: processes that each search some heads, asked through shared memory.

Read `worker_searcher` (the engine's side) and `worker` first. `supervisor` starts workers and replaces those that are
lost; `step_searches` and `step_run` are whole steps beside a GPU; `letters` and `mail` are what is said, `channel`,
`words` and `rendezvous` the way there.
"""
