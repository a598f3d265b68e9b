"""More than one process: replicas of the target, and draft models beside them, on a Ray cluster.

    front (this process)                Ray
    OpenAI's routes, tokenizer  ----->  replica: an engine in a thread (replica.py)
    router, retries (fleet.py)          replica ...      <---->  draft actor (draft_actor.py)

Ray Serve starts the replicas, watches them, starts dead ones again and scales them; which of them
gets a request is decided here, by what it has cached (`serve/router.py`). Messages are token ids,
text and numbers.
"""
