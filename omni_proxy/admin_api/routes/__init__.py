"""The HTTP routes of the admin API, one file for each group."""
