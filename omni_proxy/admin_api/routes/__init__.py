"""The routes of the admin API by subject, one class or more per file, mounted in `app.py`.

`monitoring`: what dashboards and scrapers read. `workers`: the workers of the fleet, in several
dialects. `operations`: calls to engines, mostly to all of them: weights, pauses, aborts, reports.
"""
