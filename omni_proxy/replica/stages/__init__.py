"""The built-in stages; `build(stage_name, **params)` of a stage's module returns its Scheduler."""
