"""Stages around the text model: each module has a `build(stage_name, **params)` for a Scheduler."""
