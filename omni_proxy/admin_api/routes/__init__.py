"""The routes of the admin API by subject, one class or more per file, mounted in `app.py`.

`operations`: calls to engines, mostly to all of them: weights, pauses, aborts, reports.
"""
