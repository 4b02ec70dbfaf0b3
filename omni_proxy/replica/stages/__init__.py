"""Stages around the text model; each module's `build(stage_name, **params)` returns a Scheduler."""
