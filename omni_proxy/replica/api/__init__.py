"""HTTP routes of the replica: requests in, bodies and event streams out, over a pipeline client.

`openai` has the OpenAI routes, `speech` speech and voices, `sglang` SGLang's routes and admin
operations, `vllm` vLLM's, `metrics` the load in both forms, `common` their helpers. Invariant: a
module mounts its routes with `mount(app, context)`. If a request ends early, for example by a
disconnect, its generation is aborted.
"""
