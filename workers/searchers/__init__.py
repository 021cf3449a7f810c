"""Search workers: processes that each search some heads, asked through shared memory.

Read `worker_searcher` (the engine's side) and `worker` first. `keeper` starts workers and replaces those that are lost;
`letters` and `mail` are what is said, `channel`, `words` and `rendezvous` the way there.
"""
