"""HTTP routes of the replica: requests in, bodies and event streams out, over a pipeline client.

`openai` has the OpenAI routes, `speech` speech and voices, `native` SGLang's routes and admin
operations, `vllm` vLLM's, `common` what they share. Invariant: a module mounts its
routes with `mount(app, context)`. A request that ends early, by a disconnect above all, aborts its
generation.
"""
